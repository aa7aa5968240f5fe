"""Torch and transformers bring a million objects that never go away: the collection after each test skips them."""

import gc

import transformers  # noqa: F401 - loaded here, so that it is what is frozen
from transformers import LlamaForCausalLM  # noqa: F401

import rolloutmq.trainer.loop  # noqa: F401

gc.collect()
gc.freeze()
