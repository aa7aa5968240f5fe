"""Logits in float32, of a policy whose weights are coarser.

A bfloat16 head rounds each logit to 8 bits. A logit of 20 moves by up to .06, and so do log-probabilities, entropies
and ratios, at random. Here the products of the same weights are added up and kept in float32. Sampler and trainer do
the same, or their ratio would be noise again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

TILE_BYTES: Final = 16 << 20
"""Memory of the part of the head's weights that is widened at once."""


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the type itself if it is finer."""
    return torch.promote_types(dtype, torch.float32)


def wide_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits `(..., V)` of hidden states `(..., H)`, computed in float32 or finer.

    Without gradients only a part of the weights `(V, H)` is widened at once.
    """
    kind = widened(hidden.dtype)
    wide_bias = None if bias is None else bias.to(kind)
    if torch.is_grad_enabled():
        return functional.linear(hidden.to(kind), weight.to(kind), wide_bias)
    words, width = weight.shape
    rows = hidden.reshape(-1, width).to(kind)  # (N, H)
    logits = rows.new_empty(len(rows), words)
    tile = max(1, TILE_BYTES // (width * kind.itemsize))
    for start in range(0, words, tile):
        part = slice(start, start + tile)
        logits[:, part] = rows @ weight[part].to(kind).T
    if wide_bias is not None:
        logits += wide_bias
    return logits.view(*hidden.shape[:-1], words)


@contextmanager
def float32_head(policy: Any) -> Iterator[None]:
    """Let the linear head of a policy give its logits in float32 meanwhile; any other head stays as it is."""
    head = policy.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype == widened(head.weight.dtype):
        yield
        return
    head.forward = partial(_forward, head)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward  # the method of the class is back


def _forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    return wide_logits(hidden, head.weight, head.bias)
