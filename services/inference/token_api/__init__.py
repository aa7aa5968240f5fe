"""vLLM's interface for tokens, `/inference/v1/generate`: requests and responses without a text."""
