"""HTTP without any endpoint: connections, bodies and replies, with their limits in bytes and in time."""
