"""Rewards from several raters: ensembles, their agreement, and the health of the scores of a run."""
