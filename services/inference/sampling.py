"""Sampling of the next token, for many sequences at once.

Each row has its own temperature and nucleus. The reported log-probability is that of the drawn token under the
distribution it was drawn from: after temperature, and within the nucleus. Temperature 0 takes the most likely token and
reports its log-probability at temperature 1.

Draws use Gumbel noise, so one pass serves all rows, and a request with a seed gets its own noise: the same seed, prompt
and weights give the same tokens in any batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_TINY: Final = 1e-30
COLDEST: Final = 1e-2
"""Lowest temperature above 0; lower ones are raised to it, as vLLM does."""
NARROWEST: Final = 1e-6
"""Lowest `top_p`; it keeps one token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        n: Sequences per prompt.
        max_tokens: Longest sequence, in tokens.
        stop: Texts that end a sequence.
        stop_ids: Tokens that end a sequence, beside those of the model.
        seed: Seed of the request's own noise; None uses the server's.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()

    @property
    def reported_temperature(self) -> float:
        """Temperature that the reported log-probabilities refer to."""
        return max(self.temperature, COLDEST) if self.temperature else 1.0


class Sampler:
    """Draws tokens for the rows of one batch; finished rows leave by `keep`.

    Args:
        requests: Sampling parameters and number of rows of each request, in row order.
        noise: Source of randomness for rows without a seed.
    """

    def __init__(self, requests: Sequence[tuple[Sampling, int]], noise: torch.Generator) -> None:
        counts = torch.tensor([rows for _, rows in requests])
        temperature = torch.tensor([sampling.temperature for sampling, _ in requests])
        self._greedy = (temperature == 0).repeat_interleave(counts)[:, None]  # (R, 1)
        warm = temperature.where(temperature > 0, 1.0).clamp_min(COLDEST)
        self._temperature = warm.repeat_interleave(counts)[:, None]
        # The most likely token is in every nucleus, so a greedy row needs none.
        top_p = torch.tensor([s.top_p if s.temperature > 0 else 1.0 for s, _ in requests])
        self._top_p = top_p.clamp_min(NARROWEST).repeat_interleave(counts)[:, None]
        self._noise = noise
        self._own = _own_noise(requests)
        self._rows = torch.arange(int(counts.sum()))  # index in the whole batch of each remaining row
        self._plain = bool((temperature == 1).all() and (top_p == 1).all())

    def keep(self, rows: Tensor) -> None:
        """Continue with these of the remaining rows, `(K,)` indices."""
        self._greedy, self._temperature = self._greedy[rows], self._temperature[rows]
        self._top_p, self._rows = self._top_p[rows], self._rows[rows]

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token for each remaining row.

        Args:
            logits: `(R, V)`.

        Returns:
            `(R,)` token ids and `(R,)` log-probabilities, float32.

        Raises:
            FloatingPointError: The logits are not finite: the weights are corrupt.
        """
        if self._plain:
            logprobs = logits.float().log_softmax(-1)
        else:
            logprobs = (logits.float() / self._temperature).log_softmax(-1)
            if bool((self._top_p < 1).any()):
                logprobs = nucleus(logprobs, self._top_p)
        scores = logprobs - self._exponential(logprobs).clamp_min_(_TINY).log_()
        if not self._plain:
            scores = torch.where(self._greedy, logprobs, scores)
        tokens = scores.argmax(-1)
        chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
        if not bool(chosen.isfinite().all()):
            raise FloatingPointError("the logits of the policy are not finite")
        return tokens, chosen

    def _exponential(self, like: Tensor) -> Tensor:
        drawn = torch.empty_like(like).exponential_(generator=self._noise)
        for begin, end, generator in self._own:
            # All rows of the request draw, so that a row's noise does not depend on which others remain.
            noise = torch.empty(end - begin, like.shape[1]).exponential_(generator=generator)
            mine = (self._rows >= begin) & (self._rows < end)
            drawn[mine] = noise[self._rows[mine] - begin]
        return drawn


def _own_noise(requests: Sequence[tuple[Sampling, int]]) -> list[tuple[int, int, torch.Generator]]:
    found, begin = [], 0
    for sampling, rows in requests:
        if sampling.seed is not None:
            found.append((begin, begin + rows, torch.Generator().manual_seed(sampling.seed)))
        begin += rows
    return found


def nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Restrict each row to the fewest tokens with a total probability of at least `top_p`, and renormalize.

    Args:
        logprobs: `(R, V)`.
        top_p: `(R, 1)`.
    """
    ordered, order = logprobs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of all that are more likely
    outside = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return torch.where(outside, -torch.inf, logprobs).log_softmax(-1)
