"""Commands of `rolloutmq` with more code than one call of a service, one module each."""
