"""State of the broker: groups, queues, ledger, tasks, workers."""
