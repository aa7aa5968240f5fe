"""Export of what telemetry hears to the tools of the field: Prometheus, OpenTelemetry, and experiment trackers."""
