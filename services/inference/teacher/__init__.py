"""The teacher of a distillation run: a server of token log-probabilities."""
