"""The live view of a run."""
