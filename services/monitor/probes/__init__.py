"""Liveness and readiness of the processes of a run, for supervisors such as Kubernetes."""
