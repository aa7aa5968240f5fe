"""The producer: an environment's client, with its session, credit and spool of unacked groups."""
