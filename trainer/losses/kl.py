"""Estimators of the KL divergence of one policy from a reference, from tokens that the policy sampled. Pure.

With d = logprob - ref_logprob of a sampled token:

    k1 = d                  its mean is the KL; as a term of a loss its gradient is zero on average
    k2 = d^2 / 2            its mean is not the KL; as a term of a loss its gradient is the KL's
    k3 = exp(-d) - 1 + d    its mean is the KL, never negative; as a term of a loss it has the gradient of the *other*
                            divergence, that of the reference from the policy

So value and gradient ask for different estimators, and `[trainer.loss]` refuses those that are wrong for their place.
"""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from rolloutmq.trainer.losses.ratio import bounded


def k1(difference: Tensor) -> Tensor:
    """Estimate with the right value."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """Estimate with the right gradient."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """Estimate with the right value, of little variance."""
    return (-difference).exp() - 1 + difference


ESTIMATORS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the estimate `(N,)` of each token, with the gradient of `logprobs`."""
    return ESTIMATORS[estimator](bounded(logprobs - ref_logprobs))
