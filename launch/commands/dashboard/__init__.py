"""The page of a run: served by a command, or by `up` at the first look."""
