"""Declarations of the command line that `cli` shares: parameters, completion, processes of a run."""
