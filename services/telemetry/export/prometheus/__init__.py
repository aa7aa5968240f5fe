"""The metrics of a run for Prometheus: `GET /metrics` of telemetry."""
