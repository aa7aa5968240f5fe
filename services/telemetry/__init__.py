"""Telemetry: samples of the machine, published on the bus, and the record of every event."""
