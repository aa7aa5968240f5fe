"""Benchmarks of whole runs, started from the command line."""
