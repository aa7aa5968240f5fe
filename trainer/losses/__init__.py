"""Losses: pure functions of the tokens of a batch and their log-probabilities."""
