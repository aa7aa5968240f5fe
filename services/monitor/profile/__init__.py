"""Where the time of a run goes, from the waits of its processes, and what to change."""
