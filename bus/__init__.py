"""The wire and its transport: codec, sockets, and the SDK for producers and consumers."""
