"""Sinks: experiment trackers that get the figures of a run, each in a process of its own."""
