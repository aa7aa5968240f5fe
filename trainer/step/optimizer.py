"""Optimizer: AdamW on float32 weights, for shared weights of any type.

Shared float32 weights are optimized in place. In bfloat16 most updates would round to nothing at RL learning rates, so
the optimizer keeps a float32 master copy, updates that, and rounds it into the shared weights. Weights computed from
the optimized ones (`adapters`) are published likewise. Readers are locked out only while the shared weights change.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rolloutmq.schemas.config.trainer import TrainerConfig

State = dict[str, Tensor]


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 1: linear warm-up, then linear decay to the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    past = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (1 - (1 - config.final_lr_fraction) * min(1.0, past))


def entropy_weight(config: TrainerConfig, step: int) -> float:
    """Return the entropy coefficient of a step, counted from 1."""
    end = config.loss.entropy_until * config.steps
    return config.loss.entropy * max(0.0, 1 - (step - 1) / end) if end else 0.0


class PolicyOptimizer:
    """AdamW over the trainable parameters of a policy.

    Make it after the parameters were bound to the shared weights. `publish` writes the result of a step into the shared
    weights if they are not the optimized ones. `masters` says that the optimized parameters are finer than the shared
    weights and belong into a checkpoint.
    """

    def __init__(
        self,
        policy: nn.Module,
        config: TrainerConfig,
        publish: Callable[[], None] | None = None,
        *,
        masters: bool = False,
    ) -> None:
        named = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._names = list(named)
        self._shared: list[Tensor] = list(named.values())
        self._own_master = any(p.dtype != torch.float32 for p in self._shared)
        self._master: list[Tensor] = (
            [nn.Parameter(p.detach().float().clone()) for p in self._shared]
            if self._own_master
            else self._shared
        )
        self._keeps_master = masters or self._own_master
        self._publish = self._round_into_shared if self._own_master else publish
        self._clip_norm = config.clip_norm
        self._adam = torch.optim.AdamW(
            self._master,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, lr: float, writing: AbstractContextManager[Any]) -> float:
        """Take one step with the policy's gradients, then drop them.

        Args:
            lr: Learning rate of this step.
            writing: Context entered while the shared weights change; may block.

        Returns:
            The global gradient norm before clipping. If it is not finite, no step is taken and `writing` is
            not entered.
        """
        self.take_gradients()
        norm = self._clip()
        if torch.isfinite(torch.tensor(norm)):
            self._adam.param_groups[0]["lr"] = lr
            if self._publish is None:
                with writing:
                    self._adam.step()
            else:
                self._adam.step()
                with writing:
                    self._publish()
        self.drop_gradients()
        return norm

    def _clip(self) -> float:
        """Clip the gradient and return its norm before."""
        gradients = [p.grad for p in self._master if p.grad is not None]
        norm = _whole(nn.utils.get_total_norm(gradients, foreach=True))
        nn.utils.clip_grads_with_norm_(self._master, self._clip_norm, norm, foreach=True)
        return float(norm)

    def _round_into_shared(self) -> None:
        with torch.no_grad():
            # Torch's own optimizers use this private function too.
            torch._foreach_copy_(self._shared, self._master)  # pyright: ignore[reportPrivateImportUsage]

    def drop_gradients(self) -> None:
        for parameter in (*self._shared, *self._master):
            parameter.grad = None

    def take_gradients(self) -> None:
        """Add the gradients of a backward pass to those of the masters, in float32.

        In the type of the shared weights the gradients of many passes would not add up.
        """
        if not self._own_master:
            return
        for master, shared in zip(self._master, self._shared, strict=True):
            if shared.grad is None:
                continue
            if master.grad is None:
                master.grad = shared.grad.float()
            else:
                master.grad += shared.grad
            shared.grad = None

    def state(self) -> State:
        """Return everything a checkpoint needs besides the shared weights, by name.

        Copies nothing, unless parameters are sharded: then it gathers, and all ranks must call it.
        """
        tensors: State = {}
        for name, master in zip(self._names, self._master, strict=True):
            if self._keeps_master:
                tensors[f"master.{name}"] = _whole(master.detach())
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = _whole(value)
        return tensors

    def restore(self, tensors: State) -> None:
        """Continue from a saved state.

        Raises:
            KeyError: The state belongs to another model.
        """
        for name, master in zip(self._names, self._master, strict=True):
            if self._keeps_master:
                with torch.no_grad():
                    master.copy_(_part(tensors[f"master.{name}"], master))
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors]
            if keys:
                saved = {key: tensors[f"{key}.{name}"] for key in keys}
                self._adam.state[master] = {
                    key: _part(one, master) if one.dim() else one.to(master.device, copy=True)
                    for key, one in saved.items()
                }


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Return a copy of a saved tensor, or this rank's shard of it."""
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    # Every rank has read the whole tensor: nothing has to be sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
