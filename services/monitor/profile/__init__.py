"""Where the time of a run goes: hops of its groups, waits of its processes, and what to change."""
