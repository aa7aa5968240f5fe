"""Rotation tables of a model: cos and sin of each position, as its own forward pass computes them.

RoPE has many types, and two implementations of one type may round in other places. So neither frequencies nor formulas
are compared, but the values that turn queries and keys. The owner asks its own rotary modules for them, for each kind
of layer if these differ. A server with tables (`services.inference.vllm`) compares the rows that it reads from.

Both sides compute on the CPU: elsewhere the last bits are those of the device's own functions.
"""

import copy
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.trainer.weights.manifest import Rotation

ROWS: Final = 4096
"""Positions computed at a time."""


def rotations(model: nn.Module) -> tuple[Rotation, ...]:
    """Return the rotations of a model of transformers; none if it has no rotary modules.

    Raises:
        WeightsMismatchError: A rotary module does not return cos and sin.
    """
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "rope_type")]
    if not found:
        return ()
    settings: Any = model.config
    positions = int(settings.get_text_config().max_position_embeddings)
    dtype = next(model.parameters()).dtype
    return tuple(
        Rotation(name=name, layers=layers, positions=positions, digest=digest(rows))
        for name, module in found
        for layers, rows in _tables(name, module, positions, dtype)
    )


def digest(rows: Iterable[Tensor]) -> str:
    """Return a digest of a table that comes in blocks of rows: the cosines of a position, then its sines."""
    crc, width, dtype = 0, 0, ""
    for block in rows:
        data = block.detach().cpu().contiguous()
        width, dtype = data.shape[-1], str(data.dtype).removeprefix("torch.")
        crc = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), crc)
    return f"{dtype} of width {width}, crc32 {crc:08x}"


def _tables(
    name: str, module: Any, positions: int, dtype: torch.dtype
) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Yield the rows of each table of a rotary module, with the kind of layers that use it; "" for all layers."""
    if any(tensor.device.type != "cpu" for tensor in module.buffers()):
        module = copy.deepcopy(module).cpu()
    if not isinstance(module.rope_type, dict):
        yield "", _rows(name, module, positions, dtype)
        return
    for layers in module.rope_type:
        yield layers, _rows(name, module, positions, dtype, layers)


def _rows(name: str, module: Any, positions: int, dtype: torch.dtype, *layers: str) -> Iterator[Tensor]:
    like = torch.empty(0, dtype=dtype)
    for start in range(0, positions, ROWS):
        ids = torch.arange(start, min(start + ROWS, positions))[None]
        try:
            with torch.no_grad():
                cos, sin = module(like, ids, *layers)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise WeightsMismatchError(name, f"does not return cos and sin: {error}") from None
        yield torch.cat((_once(name, cos[0]), _once(name, sin[0])), dim=-1)


def _once(name: str, doubled: Tensor) -> Tensor:
    """Return the values of a table in which each occurs twice: in two halves, or in pairs."""
    left, right = doubled.chunk(2, dim=-1)
    if torch.equal(left, right):
        return left
    left, right = doubled[..., ::2], doubled[..., 1::2]
    if torch.equal(left, right):
        return left
    raise WeightsMismatchError(name, "returns cos and sin in an unknown layout")
