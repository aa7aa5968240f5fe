"""Environment workers: the protocol of an environment, the policy it calls, and the process that runs it."""
