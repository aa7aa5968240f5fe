"""Backpressure: byte credits, rollout permits, producer sessions and acks."""
