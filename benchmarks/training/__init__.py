"""Benchmarks of a training step, of shared weights and of distillation."""
