"""Addresses and keys of a run on a network."""
