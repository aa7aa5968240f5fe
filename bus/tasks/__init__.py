"""Clients for tasks, which a trainer submits and workers take under a lease."""
