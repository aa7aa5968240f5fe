"""The trainer: policy, losses, shared weights, and the training loop. Uses torch."""
