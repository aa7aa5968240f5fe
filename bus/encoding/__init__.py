"""Encoding of groups and messages. Pure: no socket, no clock."""
