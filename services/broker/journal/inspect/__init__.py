"""Offline readers of the journal. The broker never imports them."""
