"""Summaries of many numbers that merge: what two processes saw apart is what one would have seen of both."""
