"""Comparisons with other trajectory queues, in turns."""
