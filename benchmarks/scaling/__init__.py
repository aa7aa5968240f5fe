"""Bounds of the control law on all scenarios of the simulation, over many seeds."""
