"""A GPU simulated on the CPU: tensors that claim another device, computed here, and never mixed with CPU tensors.

It refuses the same as CUDA: an operation on tensors of both devices, unless one is a single number. Data moves by
`to`,
`copy_`, `cpu` and as single numbers only. The device is called `meta`, the one other device whose gradients torch
computes without a driver; tensors deny to be meta.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

PLAYED = torch.device("meta")


class There(Tensor):
    """A tensor on the played GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls: "type[There]", held: Tensor) -> "There":
        made: There = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=PLAYED,
        )
        made.held = held
        return made

    is_meta = False

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _computed(func, args, kwargs or {})


class _Playing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Without it, tensors made from nothing would be on the real `meta`."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


@contextmanager
def playing(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Yield a device that is there as long as the block lasts."""
    with monkeypatch.context() as patch, _Playing():  # type: ignore[no-untyped-call]
        # These know by name the devices that have such kernels.
        patch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", _fits)
        patch.setattr(sys.modules["torch.nn.utils.clip_grad"], "_device_has_foreach_support", _has_all)
        patch.setattr(torch, "tensor", partial(_tensor, torch.tensor))
        yield PLAYED


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.aten.copy_.default:
        _held(args[0]).copy_(_held(args[1]))
        return args[0]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [one for one in given if not isinstance(one, There) and one.dim()]
    there = {id(one.held): one for one in given if isinstance(one, There)}
    crosses = func is torch.ops.aten._to_copy.default
    assert crosses or not (here and there), f"{func} mixes tensors of two devices"
    wanted = kwargs.get("device")
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*tree_map_only(There, _held, args), **tree_map_only(There, _held, kwargs))
    if (wanted or (PLAYED if there else None)) != PLAYED:
        return result
    # What was changed in place is the tensor that it was.
    return tree_map_only(Tensor, lambda one: there[id(one)] if id(one) in there else There(one), result)


def _tensor(real: Any, data: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """On the real `meta` a tensor loses what it was given before anything is dispatched."""
    made: Tensor = real(data, **kwargs)
    return made if device is None else made.to(device)


def _fits(*_: Any, **__: Any) -> None: ...


def _has_all(_device: torch.device) -> bool:
    return True


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, There) else tensor
