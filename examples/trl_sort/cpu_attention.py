"""TRL's asynchronous trainer without a GPU: torch computes what its kernel, FlashAttention 3, would."""

from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import packing


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    _longest_query: int,
    _longest_key: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """FlashAttention's `flash_attn_varlen_func`: a query sees the keys of its segment, up to its place from their end.

    Args:
        query: (N, heads, dimension).
        key: (K, groups of heads, dimension), as `value`.
        query_starts: (S + 1) bounds of the segments, as `key_starts`.
    """
    assert causal
    assert window_size == (-1, -1)
    query_lengths, key_lengths = query_starts.diff(), key_starts.diff()
    segments = torch.arange(len(query_lengths))
    mine, theirs = segments.repeat_interleave(query_lengths), segments.repeat_interleave(key_lengths)
    from_end = query_starts[1:][mine] - torch.arange(len(query))
    keys_from_end = key_starts[1:][theirs] - torch.arange(len(key))
    mask = (mine[:, None] == theirs) & (from_end[:, None] <= keys_from_end)
    q, k, v = (one.transpose(0, 1) for one in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)
    return out.transpose(0, 1)


def without_gpu() -> None:
    """Stand in for what needs a GPU."""
    torch.cuda.get_device_name = lambda device=None: "CPU"  # noqa: ARG005 - its own signature
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
