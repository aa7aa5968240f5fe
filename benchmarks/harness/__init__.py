"""Shared parts of all benchmarks: processes, workloads, rows and the result file."""
