"""Evaluation: a fixed set of tasks, answered by the workers of a run, and the scores of their answers."""
