"""Snapshots: the broker's whole state, written and restored."""
