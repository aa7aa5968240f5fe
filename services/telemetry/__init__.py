"""What the machine does while the run goes on: samples published on the bus, and the record of every event."""
