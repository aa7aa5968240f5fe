"""The search for the number of workers that shared inference servers can feed."""
