"""Environments of Prime Intellect's `verifiers` in a worker: up to version 0.3 here, those of 0.4 in `tasksets`."""
