"""Composition: from a configuration to running processes, and the command line."""
