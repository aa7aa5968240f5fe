"""Environments of `verifiers` 0.4, by its tasksets, harnesses and agents, as environments of a worker."""
