"""Inference engines beyond the first: their number, and their processes."""
