"""Where the trainer computes: on the CPU, or on a GPU of this host.

The policy is built on the CPU, where tables of RoPE have the same bits everywhere, and moved; batches follow it pass by
pass. What leaves the trainer (weights on disk or on their way to vLLM, checkpoints, metrics) leaves it from the CPU.
"""

import torch

from rolloutmq.schemas.errors import MissingError
from rolloutmq.trainer.model import Policy


def find_device(name: str) -> torch.device:
    """Return the device that `trainer.device` names.

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
    """Move a policy in place, and return it. What was tied stays tied."""
    if device.type != "cpu":
        policy.to(device)
        policy.tie_weights()  # type: ignore[operator]
    return policy


def device_of(policy: torch.nn.Module) -> torch.device:
    """Return where the parameters of a policy are."""
    return next(policy.parameters()).device
