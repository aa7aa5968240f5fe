"""Adapters of other trainers to the bus, one package each; importing this one imports none of them."""
