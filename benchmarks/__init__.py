"""Acceptance and benchmarks: `make accept` and `make bench`."""
