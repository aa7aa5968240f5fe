"""Input and output of the broker: the data plane's thread, sockets and limits. Only the data plane calls the core."""
