"""Request handlers, one for each kind of client: producers, consumers, tasks, operators."""
