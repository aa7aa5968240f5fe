"""A run of another host: a private directory on this host that is kept like its run directory."""
