"""Batches: their composition, leases, settlement, rewind and staleness."""
