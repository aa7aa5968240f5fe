"""OpenAI's HTTP interface as vLLM speaks it: requests and responses."""
