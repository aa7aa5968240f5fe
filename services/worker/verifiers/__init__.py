"""Environments of Prime Intellect's `verifiers`, up to its version 0.3, as environments of a worker."""
