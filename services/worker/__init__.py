"""Environment workers: the protocol of an environment, the policy it asks, and the process that runs it."""
