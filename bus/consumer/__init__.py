"""The consumer: a trainer's client, which pulls batches under leases."""
