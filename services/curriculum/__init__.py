"""The curriculum: samplers that choose the tasks of environments, and the service that submits them."""
