"""Text output: logs, events, number formats, exit codes."""
