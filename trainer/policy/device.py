"""Device of the trainer: the CPU, or a GPU of this host.

The policy is built on the CPU, where RoPE tables have the same bits everywhere, and then moved; batches follow pass by
pass. Everything that leaves the trainer (weights on disk or in transfer, checkpoints, metrics) leaves from the CPU.
"""

import torch

from rolloutmq.schemas.errors import MissingError
from rolloutmq.trainer.policy.model import Policy


def find_device(name: str) -> torch.device:
    """Return the device of `trainer.device`.

    Raises:
        MissingError: Torch sees no such GPU.
    """
    device = torch.device(name)
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= seen:
        remedy = "let the trainer see one (CUDA_VISIBLE_DEVICES), with a torch built for it, or take device = 'cpu'"
        raise MissingError(f"the device {name} (trainer.device): torch sees {seen} GPUs", remedy)
    return device


def moved(policy: Policy, device: torch.device) -> Policy:
    """Move a policy in place, and return it. Ties stay ties."""
    if device.type != "cpu":
        policy.to(device)
        policy.tie_weights()  # type: ignore[operator]
    return policy


def device_of(policy: torch.nn.Module) -> torch.device:
    """Return the device of the parameters of a policy."""
    return next(policy.parameters()).device
