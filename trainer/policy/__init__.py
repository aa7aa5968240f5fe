"""The policy under training: weights, tokenizer, adapters, device."""
