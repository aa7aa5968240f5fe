"""Keeps processes alive: the law of supervision, its shell, and the workers that the pressure asks for."""
