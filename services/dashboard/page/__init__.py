"""The page of a run: its files as they are served, and the same in one file with the data of a run."""
