"""Autoscaling: the number of workers of each environment. Pure; the caller passes the clock."""
