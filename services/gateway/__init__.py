"""The gateway: the HTTP interface of Atropos, served by the bus."""
