"""Readers of the journal: files, segments, recovery."""
