"""The orchestrator: supervision of workers and engines, autoscaling, and GPU placement."""
