"""Benchmarks of the broker and its journal."""
