"""Batched generation from shared weights, with a KV cache.

A batch is a list of jobs. Each prompt is read once, padded on the left, for all sequences sampled from it. Then all
sequences advance one token at a time, and finished ones leave. A job is delivered when its last sequence ends, without
waiting for the batch.

Every forward pass holds the weights still (`WeightShare.reading`) and stamps its tokens with the version it read. So
the weights may change between two tokens of a sequence, which then has two spans. The KV cache of earlier tokens is not
recomputed. Blocks; one thread at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Continuation, Job, Span
from rolloutmq.services.inference.sampling import Sampler
from rolloutmq.trainer.policy.head import float32_head


class Weights(Protocol):
    """Lock of the weights, see `WeightShare`."""

    def keeping(self) -> AbstractContextManager[None]: ...

    def reading(self) -> AbstractContextManager[PolicyVersion]: ...


class Generator:
    """Continues prompts with a policy whose weights may change at any time.

    Args:
        policy: Transformers causal language model, attached to `weights`.
        end_ids: Tokens that end a sequence.
        decode: Returns the text of token ids; used for jobs with stop texts only.
        seed: Seed of the noise for jobs without one.
        fp32_head: Compute the logits of a coarser policy in float32, as the trainer does.
    """

    def __init__(
        self,
        policy: Any,
        weights: Weights,
        end_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        seed: int = 0,
        *,
        fp32_head: bool = False,
    ) -> None:
        self._policy = policy
        self._head = partial(float32_head, policy) if fp32_head else nullcontext
        self._weights = weights
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.long)
        self._decode = decode
        self._noise = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def generate(self, jobs: Sequence[Job], on_done: Callable[[list[Job]], None]) -> None:
        """Sample all continuations of the jobs. Blocks until the last is done.

        Args:
            on_done: Called with finished jobs, each once; cancelled jobs are left out.

        Raises:
            WeightsTornError, WeightsBusyError: The weights cannot be read; undelivered jobs are void.
        """
        with self._weights.keeping():
            self._generate(jobs, on_done)

    def _generate(self, jobs: Sequence[Job], on_done: Callable[[list[Job]], None]) -> None:
        batch = _Batch(jobs, self._noise)
        logits = self._prefill(batch)
        while True:
            tokens = batch.record(*batch.sampler.draw(logits))
            ended = (
                torch.isin(tokens, self._end_ids) | batch.stops_by_id() | batch.stops_by_text(self._decode)
            )
            if done := batch.leave(ended):
                on_done(done)
            if not len(batch.living):
                return
            logits = self._step(batch)

    def _prefill(self, batch: "_Batch") -> Tensor:
        tokens, mask = pad_left(batch.prompts)  # (P, T)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        batch.cache = DynamicCache(config=self._policy.config)
        logits = self._forward(batch, tokens, mask, positions)
        if batch.branches is not None:
            batch.cache.batch_select_indices(batch.branches)
            logits, mask, positions = logits[batch.branches], mask[batch.branches], positions[batch.branches]
        batch.mask, batch.positions = mask, positions[:, -1:]
        return logits

    def _step(self, batch: "_Batch") -> Tensor:
        batch.mask = torch.nn.functional.pad(batch.mask, (0, 1), value=1)
        batch.positions = batch.positions + 1
        return self._forward(batch, batch.last[:, None], batch.mask, batch.positions)

    def _forward(self, batch: "_Batch", tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        with self._weights.reading() as version, self._head():
            logits: Tensor = self._policy(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=batch.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        batch.versions.append(version)
        return logits[:, -1]


class _Batch:
    """The sequences of some jobs, all of the same age. `living` are the numbers of unfinished rows."""

    def __init__(self, jobs: Sequence[Job], noise: torch.Generator) -> None:
        self.jobs = jobs
        self.prompts = [prompt for job in jobs for prompt in job.prompts]
        fan_out = torch.tensor([job.sampling.n for job in jobs for _ in job.prompts])
        self.branches = (
            torch.arange(len(self.prompts)).repeat_interleave(fan_out) if int(fan_out.max()) > 1 else None
        )
        rows = torch.tensor([job.rows for job in jobs])
        self.limits = torch.tensor([job.sampling.max_tokens for job in jobs]).repeat_interleave(rows)
        self.owners = torch.arange(len(jobs)).repeat_interleave(rows)
        self.first_rows = (rows.cumsum(0) - rows).tolist()
        self.sampler = Sampler([(job.sampling, job.rows) for job in jobs], noise)
        self.living = torch.arange(len(self.owners))
        self.tokens = torch.zeros(len(self.owners), int(self.limits.max()), dtype=torch.long)
        self.logprobs = torch.zeros(self.tokens.shape)
        self.lengths = torch.zeros(len(self.owners), dtype=torch.long)
        self.stopped = torch.zeros(len(self.owners), dtype=torch.bool)
        self.versions: list[PolicyVersion] = []
        """Version of each step."""
        self.handed_out: set[int] = set()
        self.cache: Any = None
        self.mask = self.positions = self.last = torch.empty(0, dtype=torch.long)
        self._by_text = any(job.sampling.stop for job in jobs)
        self._by_id = [
            (number, job.sampling.stop_ids) for number, job in enumerate(jobs) if job.sampling.stop_ids
        ]

    def record(self, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Append the drawn tokens of the unfinished rows, and return the tokens."""
        step = len(self.versions) - 1
        self.tokens[self.living, step] = tokens
        self.logprobs[self.living, step] = logprobs
        self.last = tokens
        return tokens

    def stops_by_id(self) -> Tensor:
        """Return which unfinished rows have just drawn one of their stop tokens."""
        found = torch.zeros(len(self.living), dtype=torch.bool)
        for number, ids in self._by_id:
            found |= (self.owners[self.living] == number) & torch.isin(self.last, torch.tensor(ids))
        return found

    def stops_by_text(self, decode: Callable[[list[int]], str]) -> Tensor:
        """Return which unfinished rows contain one of their stop texts."""
        found = torch.zeros(len(self.living), dtype=torch.bool)
        if not self._by_text:
            return found
        for index, row in enumerate(self.living.tolist()):
            stops = self.jobs[int(self.owners[row])].sampling.stop
            if stops:
                text = decode(self.tokens[row, : len(self.versions)].tolist())
                found[index] = any(stop in text for stop in stops)
        return found

    def leave(self, ended: Tensor) -> list[Job]:
        """Remove rows that ended, are full or were cancelled; return the jobs that are complete now."""
        length = len(self.versions)
        gone = ended | (self.limits[self.living] <= length)
        cancelled = [number for number, job in enumerate(self.jobs) if job.cancelled]
        if cancelled:
            gone |= torch.isin(self.owners[self.living], torch.tensor(cancelled))
        if not bool(gone.any()):
            return []
        rows = self.living[gone]
        self.lengths[rows], self.stopped[rows] = length, ended[gone]
        kept = (~gone).nonzero().squeeze(-1)
        self.living = self.living[kept]
        if len(kept):
            self.mask, self.positions, self.last = self.mask[kept], self.positions[kept], self.last[kept]
            self.cache.batch_select_indices(kept)
            self.sampler.keep(kept)
        return self._hand_out()

    def _hand_out(self) -> list[Job]:
        busy = set(self.owners[self.living].tolist())
        complete = [number for number in range(len(self.jobs)) if number not in busy | self.handed_out]
        self.handed_out.update(complete)
        done = [self.jobs[number] for number in complete if not self.jobs[number].cancelled]
        for number in complete:
            job, first = self.jobs[number], self.first_rows[number]
            job.results = [] if job.cancelled else self._sequences(slice(first, first + job.rows))
        return done

    def _sequences(self, rows: slice) -> list[Continuation]:
        spans = {length: spans_of(self.versions[:length]) for length in set(self.lengths[rows].tolist())}
        return [
            Continuation(tokens[:length], logprobs[:length], spans[length], stopped)
            for tokens, logprobs, length, stopped in zip(
                self.tokens[rows].tolist(),
                self.logprobs[rows].tolist(),
                self.lengths[rows].tolist(),
                self.stopped[rows].tolist(),
                strict=True,
            )
        ]


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return `(P, T)` token ids padded with zeros on the left, and `(P, T)` ones where there are tokens."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    return tokens, mask


def spans_of(versions: Sequence[PolicyVersion]) -> tuple[Span, ...]:
    """Merge equal consecutive versions into spans."""
    spans: list[Span] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = Span(spans[-1].start, index + 1, version)
        else:
            spans.append(Span(index, index + 1, version))
    return tuple(spans)
