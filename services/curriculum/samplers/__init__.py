"""Samplers: which task of a task space comes next. Pure, seeded, and without torch, sockets or clocks."""
