"""Borders of every HTTP server of a run: who may call it, and its listening sockets."""
