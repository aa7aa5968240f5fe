"""Losses: pure functions of what a batch and the policy say of its tokens."""
