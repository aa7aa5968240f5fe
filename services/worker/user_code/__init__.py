"""The user's code in the event loop of a worker: its exits and its failures."""
