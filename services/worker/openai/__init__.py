"""OpenAI's HTTP interface as a worker uses it: the client, its requests and responses, the choice of a server."""
