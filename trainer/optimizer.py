"""The optimizer: AdamW on float32 weights, whatever the type of the weights that are shared.

Shared weights of type float32 are themselves what is optimized, in place. Others (bfloat16) are too coarse for that:
at the learning rates of RL most updates would round to nothing. For them a float32 master is kept here; it takes the
step, and the shared weights get a rounded copy. Readers are kept out only while the shared weights change.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rolloutmq.schemas.config import TrainerConfig

State = dict[str, Tensor]


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 1: a linear rise, then a linear fall to the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    past = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (1 - (1 - config.final_lr_fraction) * min(1.0, past))


def entropy_weight(config: TrainerConfig, step: int) -> float:
    """Return the weight of the entropy bonus at a step, counted from 1."""
    end = config.entropy_until * config.steps
    return config.entropy * max(0.0, 1 - (step - 1) / end) if end else 0.0


class PolicyOptimizer:
    """AdamW over the parameters of one policy. Make it after the parameters were bound to what is shared."""

    def __init__(self, policy: nn.Module, config: TrainerConfig) -> None:
        named = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._names = list(named)
        self._shared: list[Tensor] = list(named.values())
        self._own_master = any(p.dtype != torch.float32 for p in self._shared)
        self._master: list[Tensor] = (
            [nn.Parameter(p.detach().float().clone()) for p in self._shared]
            if self._own_master
            else self._shared
        )
        self._clip_norm = config.clip_norm
        self._adam = torch.optim.AdamW(
            self._master,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, lr: float, writing: AbstractContextManager[Any]) -> float:
        """Take one step with the gradients that the policy has, then drop them.

        Args:
            lr: Learning rate of this step.
            writing: Entered for as long as the shared weights change; may block.

        Returns:
            The global norm of the gradient before it was scaled down. If it is not finite, no step was taken and
            `writing` was not entered.
        """
        self._hand_over_gradients()
        norm = float(nn.utils.clip_grad_norm_(self._master, self._clip_norm, foreach=True))
        if torch.isfinite(torch.tensor(norm)):
            self._adam.param_groups[0]["lr"] = lr
            if self._own_master:
                self._adam.step()
                with writing, torch.no_grad():
                    torch._foreach_copy_(self._shared, self._master)
            else:
                with writing:
                    self._adam.step()
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for parameter in (*self._shared, *self._master):
            parameter.grad = None

    def _hand_over_gradients(self) -> None:
        if not self._own_master:
            return
        for master, shared in zip(self._master, self._shared, strict=True):
            master.grad = None if shared.grad is None else shared.grad.float()
            shared.grad = None

    def state(self) -> State:
        """Return everything that a checkpoint must hold besides the shared weights, by name. Copies nothing."""
        tensors: State = {}
        for name, master in zip(self._names, self._master, strict=True):
            if self._own_master:
                tensors[f"master.{name}"] = master.detach()
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def restore(self, tensors: State) -> None:
        """Go on from a saved state.

        Raises:
            KeyError: It is the state of another model.
        """
        for name, master in zip(self._names, self._master, strict=True):
            if self._own_master:
                with torch.no_grad():
                    master.copy_(tensors[f"master.{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors]
            if keys:
                self._adam.state[master] = {key: tensors[f"{key}.{name}"].clone() for key in keys}
