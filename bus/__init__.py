"""The SDK for producers, consumers and tasks, with its codec, sockets and shared memory."""
