"""The journal: groups in segments, events in logs, and their readers."""
