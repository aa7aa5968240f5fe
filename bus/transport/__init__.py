"""Sockets, addresses, requests and events."""
