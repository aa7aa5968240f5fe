"""Workers that are programs of somebody else's: the `command` of an environment, and its life at the gateway."""
