"""One training step: advantages, tensors, log-probabilities, gradient, optimizer."""
