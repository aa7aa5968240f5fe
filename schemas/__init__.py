"""Data structures of messages, files and configuration. No I/O, no torch."""
