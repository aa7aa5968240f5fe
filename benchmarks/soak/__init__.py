"""The soak: a run killed, stopped and abandoned at random, and checked against a ledger of its own."""
