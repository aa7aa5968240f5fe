"""Keys of the broker's sockets on a network."""
