"""Jobs of an inference engine: prompts of one request, and the sampled continuations."""

from dataclasses import dataclass, field

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` of a sequence, drawn from one version of the weights."""

    start: int
    end: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Continuation:
    """One sampled continuation. `stopped` is False if `max_tokens` ended it."""

    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[Span, ...]
    stopped: bool


@dataclass(eq=False, slots=True)
class Job:
    """Prompts of one request with their sampling parameters, and later `n` continuations per prompt, in order."""

    prompts: list[list[int]]
    sampling: Sampling
    cancelled: bool = False
    """The caller has gone. Set from any thread; the sequences leave at the next step."""
    results: list[Continuation] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of sequences to sample."""
        return len(self.prompts) * self.sampling.n
