"""The room of a cluster: what its nodes have, what a run wants of them, and which of them it leaves."""
