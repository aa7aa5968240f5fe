"""Supervision of processes: state machine, supervisor, worker table."""
