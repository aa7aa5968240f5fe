"""A plant of workers, a queue and a trainer to try control laws on: seeded, and faster than time."""
