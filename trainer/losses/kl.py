"""Estimators of the KL divergence of the policy from a reference, on tokens the policy sampled. Pure.

With d = logprob - ref_logprob of a sampled token:

    k1 = d                  unbiased value; as a loss term its gradient is zero on average
    k2 = d^2 / 2            biased value; as a loss term it has the gradient of the KL
    k3 = exp(-d) - 1 + d    unbiased value, never negative; as a loss term it has the gradient of the
                            reverse KL, that of the reference from the policy

No estimate is clamped: the further a token is from its reference, the harder it is pulled back. The one exception is k3
where exp would overflow (`k3`).

Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); k3 is eq. 4 of DeepSeekMath
(arXiv:2402.03300); the gradients: arXiv:2506.09477. A value and a gradient need different estimators; `[trainer.loss]`
refuses a wrong combination.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor


def k1(difference: Tensor) -> Tensor:
    """Return the estimate with an unbiased value."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """Return the estimate with an unbiased gradient."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """Return the estimate with an unbiased value and low variance.

    Where exp(-d) would overflow (d below -88 in float32, below -709 in float64), it has the value of that bound and no
    gradient.
    """
    largest = math.floor(math.log(torch.finfo(difference.dtype).max))
    held = difference.clamp(min=-largest)
    return (-held).exp() - 1 + held


ESTIMATORS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the estimate `(N,)` of each token, with the gradient of `logprobs`."""
    return ESTIMATORS[estimator](logprobs - ref_logprobs)
