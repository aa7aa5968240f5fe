"""Shared by the trainer's tests: a tiny configuration, the sort-three-digits task sampled in process, and a broker in
memory with the guarantees of the real one (leases, rewinding, retained batches).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.control import StepDone, StepSkipped
from rolloutmq.schemas.wire.envelope import Message, PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected, RunInfo
from rolloutmq.schemas.wire.requests import TrainerPause
from rolloutmq.trainer.policy.model import Policy, build_policy
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare

BEGIN, END, FIRST_DIGIT, EQUALS = 1, 2, 3, 13


def run_config(**trainer: Any) -> RunConfig:
    """A run whose steps cost almost nothing, unless told otherwise."""
    small = {"steps": 6, "batch_sequences": 32, "checkpoint_interval": 2, "warmup_steps": 2}
    return RunConfig(
        model=ModelConfig(hidden_size=16, layers=1, mlp_size=16),
        trainer=TrainerConfig(**(small | trainer)),
    )


def some_group(
    name: str,
    scores: Sequence[float],
    *,
    seed: int = 0,
    version: PolicyVersion = PolicyVersion(),
    **columns: Any,
) -> Group:
    """A group of random ragged sequences with those scores; given columns take the place of its own.

    Their values may be ones that the builder refuses: the trainer must not rely on who built a group.
    """
    rng = np.random.default_rng([seed, *name.encode()])
    lengths = rng.integers(4, 9, len(scores))
    made: dict[str, Any] = {
        "tokens": [rng.integers(0, 15, n).astype(np.int32) for n in lengths],
        "mask": [np.arange(n) >= n // 2 for n in lengths],
        "inference_logprobs": [-3 * rng.random(n).astype(np.float32) for n in lengths],
    }
    given = made | columns
    mask = Column.build("mask", given["mask"], 1)
    untrained = replace(mask, values=np.zeros_like(mask.values))
    group = Group.build(name, scores=list(scores), oldest=version, **(given | {"mask": untrained}))
    return replace(group, columns={**group.columns, "mask": mask})


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Continue prompts `(B, P)` by `length` tokens; return tokens `(B, P + length)` and logprobs `(B, length)`."""
    tokens, logprobs = prompts, []
    for _ in range(length):
        spread = policy(input_ids=tokens, use_cache=False).logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(spread.exp(), 1, generator=random)
        logprobs.append(spread.gather(-1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    return tokens, torch.cat(logprobs, 1)


def sort_groups(
    policy: Policy, version: PolicyVersion, random: torch.Generator, prompts: int, size: int, name: str
) -> list[Group]:
    """Roll out `prompts` groups of `size` attempts to sort three digits; the score is the share of right places."""
    digits = torch.randint(0, 10, (prompts, 3), generator=random)
    begin, equals = torch.full((prompts, 1), BEGIN), torch.full((prompts, 1), EQUALS)
    asked = torch.cat([begin, digits + FIRST_DIGIT, equals], 1)
    tokens, logprobs = sample(policy, asked.repeat_interleave(size, 0), 4, random)
    answer = torch.cat([digits.sort(1).values + FIRST_DIGIT, torch.full((prompts, 1), END)], 1)
    right = tokens[:, 5:] == answer.repeat_interleave(size, 0)
    # What follows an early end was never sampled by an environment.
    ended = (tokens[:, 5:] == END).cumsum(1)
    kept = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1) == 0
    scores = (right & kept).double().mean(1).numpy()
    lengths = 5 + kept.sum(1).numpy()
    padded = np.concatenate([np.zeros((len(tokens), 5), np.float32), logprobs.numpy()], 1)
    groups = []
    for start in range(0, len(tokens), size):
        rows = range(start, start + size)
        groups.append(
            Group.build(
                f"{name}-{start}",
                tokens=[tokens[row, : lengths[row]].numpy().astype(np.int32) for row in rows],
                mask=[np.arange(lengths[row]) >= 5 for row in rows],
                inference_logprobs=[padded[row, : lengths[row]] for row in rows],
                scores=scores[start : start + size],
                oldest=version,
            )
        )
    return groups


@dataclass(eq=False)
class MemoryBatch:
    """A leased batch."""

    step: int
    groups: list[Group]
    rejected: tuple[Rejected, ...] = ()
    short: bool = False
    rewound: bool = False
    lease: int = 0
    generation: int = 0
    moments: Mapping[str, Moments] = field(default_factory=dict)


@dataclass
class MemoryBroker:
    """Hands out what `make(step, version)` gives, retains it until a commit, and rewinds at a registration."""

    make: Callable[[int, PolicyVersion], list[Group]]
    pulls: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    settled: list[dict[str, Any]] = field(default_factory=list)
    commits: list[PolicyVersion] = field(default_factory=list)
    events: list[StepDone] = field(default_factory=list)
    skipped: list[StepSkipped] = field(default_factory=list)
    joined: list[PolicyVersion] = field(default_factory=list)
    on_pull: Callable[[int], None] = lambda _number: None
    on_settle: Callable[[int], None] = lambda _number: None
    """Called with the number of the call, from 1, before anything changes; may raise."""
    commit_wanted: bool = False
    progressed: int = 0
    waits_s: dict[TrainerPause, float] = field(default_factory=dict)
    retained: list[MemoryBatch] = field(default_factory=list)
    again: deque[MemoryBatch] = field(default_factory=deque)
    lease: MemoryBatch | None = None
    moments: dict[str, Moments] = field(default_factory=dict)

    @contextmanager
    def connect(
        self, _run_dir: Path, info: RunInfo, version: PolicyVersion, _config: TrainerConfig, _rank: int
    ) -> Iterator["MemoryBroker"]:
        """Register a trainer that has this version."""
        assert info.starting_step == version.step
        self.joined.append(version)
        back = [batch for batch in self.retained if batch.step > version.step]
        self.retained = [batch for batch in self.retained if batch.step <= version.step]
        self.again.extendleft(reversed([replace(b, rewound=True) for b in back]))
        yield self
        self.release()

    def release(self) -> None:
        """Take the lease back: its batch is the next."""
        if self.lease is not None:
            self.again.appendleft(self.lease)
            self.lease = None

    def pull(self, step: int, version: PolicyVersion) -> MemoryBatch | None:
        self.pulls.append((step, version))
        self.on_pull(len(self.pulls))
        batch = self.again.popleft() if self.again else self._new(step, version)
        batch.step = step
        self.lease = batch
        return batch

    def _new(self, step: int, version: PolicyVersion) -> MemoryBatch:
        groups = self.make(step, version)
        for group in groups:
            known = self.moments.get(group.env, Moments())
            self.moments[group.env] = known.after(group.rewards(), group.sequences)
        return MemoryBatch(step, groups, moments=dict(self.moments))

    def settle(
        self,
        batch: MemoryBatch,
        *,
        version: PolicyVersion,
        trained: Sequence[str],
        filtered: Sequence[str],
        rejected: Sequence[Rejected],
        patience_s: float | None = None,
    ) -> bool:
        del patience_s
        self.on_settle(len(self.settled) + 1)
        if self.lease is not batch:
            raise LeaseLostError(batch.step, "it went back")
        named = [*trained, *filtered, *(one.group_id for one in rejected)]
        assert sorted(named) == sorted(group.group_id for group in batch.groups)
        self.lease = None
        batch.step = version.step
        self.retained.append(batch)
        self.settled.append(
            {"version": version, "trained": trained, "filtered": filtered, "rejected": list(rejected)}
        )
        return self.commit_wanted

    def commit(self, version: PolicyVersion) -> None:
        self.commits.append(version)
        self.retained = [batch for batch in self.retained if batch.step > version.step]

    def progress(self) -> None:
        self.progressed += 1

    def waited(self, reason: TrainerPause, seconds: float) -> None:
        self.waits_s[reason] = self.waits_s.get(reason, 0.0) + seconds

    def publish(self, topic: bytes, message: Message) -> None:
        if topic.startswith(b"telemetry.skipped."):
            assert isinstance(message, StepSkipped)
            self.skipped.append(message)
            return
        assert topic == b"step"
        assert isinstance(message, StepDone)
        self.events.append(message)


class SortBroker(MemoryBroker):
    """A broker whose groups are sampled from the shared weights of a run, as its inference server would."""

    def __init__(self, config: RunConfig, layout: RunLayout, group_size: int = 16) -> None:
        self._policy = build_policy(config.model, seed=999)
        self._share: WeightShare | None = None
        self._layout = layout
        self._prompts = config.trainer.batch_sequences // group_size
        self._size = group_size
        self._random = torch.Generator().manual_seed(config.run.seed)
        super().__init__(self._roll_out)

    def _roll_out(self, step: int, version: PolicyVersion) -> list[Group]:
        if self._share is None:
            tokenizer = directory_fingerprint(self._layout.model)
            self._share = WeightShare.attach(self._policy, self._layout.weights, tokenizer=tokenizer)
        with self._share.reading() as found:
            assert found == version
            return sort_groups(
                self._policy,
                version,
                self._random,
                self._prompts,
                self._size,
                f"{version.incarnation}.{step}",
            )

    def close(self) -> None:
        if self._share is not None:
            self._share.close()
