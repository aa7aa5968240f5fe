"""Process plumbing of all services: event loop, signals, log, lock, identity, child processes."""
