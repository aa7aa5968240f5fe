"""Figures of the SDK as a user's program runs it."""
