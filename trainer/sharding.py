"""Sharded policy: each rank holds a part of every parameter, its gradient, and the optimizer's moments (FSDP2).

Parameters are gathered block by block for computation. Gradients are summed over the ranks, not averaged, because each
rank's loss is divided by the size of the whole step already. Shards are float32. If the shared weights are bfloat16,
computation is in bfloat16, and the shards are their masters.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rolloutmq.trainer.checkpoint import own_tensors
from rolloutmq.trainer.ranks import Ranks
from rolloutmq.trainer.step.logprobs import LogprobScorer


class Sharded:
    """The shards of the policy of one scorer, a twin of the shared one. Make it before the optimizer."""

    def __init__(self, scorer: LogprobScorer, ranks: Ranks) -> None:
        self._policy = scorer.policy
        self.plain: dict[str, Tensor] = {}
        """The shared weights by name, each once; on the rank that owns them."""
        if ranks.leads:
            self.plain = own_tensors(self._policy)
        coarse = {p.dtype for p in self._policy.parameters()} - {torch.float32}
        self.masters = bool(coarse)
        """Whether the shards are finer than the shared weights."""
        mixed = MixedPrecisionPolicy()
        if coarse:
            (dtype,) = coarse
            _widen(self._policy)
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = _mesh(ranks.size)
        blocks = [module for module in scorer.modules() if isinstance(module, GradientCheckpointingLayer)]
        for module in (*blocks, scorer):
            sharded = fully_shard(module, mesh=mesh, mp_policy=mixed)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def publish(self) -> None:
        """Write the parameters into the shared weights. All ranks take part; the owner holds the write lock."""
        with torch.no_grad():
            for name, parameter in self._policy.named_parameters():
                assert isinstance(parameter, DTensor)
                whole = parameter.full_tensor()
                if self.plain:
                    self.plain[name].copy_(whole)


def gathered(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors, those of sharded modules whole: a `weights.share.Source` that holds one at a time.

    All ranks of the tensors take part: those that do not publish exhaust it, `for _ in gathered(...): pass`.
    """
    with torch.no_grad():
        for name, tensor in tensors:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mesh(size: int) -> DeviceMesh:
    """Make a mesh of all ranks that does not keep their process group alive.

    DTensor caches meshes for as long as the process lives. Newer torch lets a mesh refer to its group, whose threads
    would outlive the meeting (`loop.run_to_exit_code`). Without that reference the mesh finds its group by name.
    """
    mesh = init_device_mesh("cpu", (size,))
    getattr(mesh, "_pg_registry", {}).clear()
    return mesh


def _widen(policy: torch.nn.Module) -> None:
    """Give a policy float32 parameters of its own; ties stay ties."""
    wide: dict[int, torch.nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = wide.setdefault(id(parameter), torch.nn.Parameter(parameter.detach().float()))
                module._parameters[name] = own
