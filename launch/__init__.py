"""The command line, and the launcher that turns a configuration into running processes."""
