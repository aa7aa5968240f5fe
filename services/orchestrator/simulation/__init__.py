"""Simulation of workers, queue and trainer, to test controllers: seeded, and faster than real time."""
