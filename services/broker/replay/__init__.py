"""Replay: the batches of a recorded run, served again."""
