"""Groups of a trainer's prompts by task id, for the adapters of trainers that ask for them."""
