"""Processes of a run on a cluster of other software, which finds the hosts for them."""
