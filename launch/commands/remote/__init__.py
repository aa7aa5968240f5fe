"""Commands for a run of another host, and programs that join it."""
