"""Shared memory of the processes of one host."""
