"""The current state of a run, and the reasons why its processes wait."""
