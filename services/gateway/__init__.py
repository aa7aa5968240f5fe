"""The gateway: Atropos' HTTP interface on top of the bus."""
