"""Measurements of the bus on a network."""
