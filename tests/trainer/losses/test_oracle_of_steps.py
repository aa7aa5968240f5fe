"""Whole steps against the second oracle: groups in, gradients of a policy out, for any packing and any ranks.

The trainer judges the groups, collates them into passes with shared rows, spreads them over ranks, scores and sums. The
oracle scores one sequence after the other.
"""

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.trainer.losses import oracle
from tests.trainer.losses.test_oracle import some_section
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from rolloutmq.schemas.config.losses import LossSection
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.losses.registry import LOSSES, columns_needed
from rolloutmq.trainer.ranks import Ranks
from rolloutmq.trainer.step.advantages import study
from rolloutmq.trainer.step.collate import Bounds, collate
from rolloutmq.trainer.step.gradient import leave_gradient
from rolloutmq.trainer.step.logprobs import LogprobScorer
from rolloutmq.trainer.step.teacher_columns import columns_needed as columns_of_teacher

ROUNDS = 3
WORDS, LONGEST, TOP_K = 23, 12, 4
NOW = 3
DEADLINE_S = 60.0
EXACT = 1e-7
"""Advantages are rounded to float32; a sum in another order may round to the other side."""
COARSE = 1e-5
"""For `top_k`: the trainer takes what is left of the teacher's probability in float32, as the teacher sent it."""
T = TypeVar("T", bound=msgspec.Struct)


def built() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config).double().eval()


POLICY = built()


class Meeting:
    """Ranks in threads, which exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self._values: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Threaded(Ranks):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def sums(self, *values: int) -> list[int]:
        return [sum(each) for each in zip(*self._meeting.gather(self.rank, values), strict=True)]

    def most(self, value: int) -> int:
        return int(max(self._meeting.gather(self.rank, value)))

    def every(self, own: T) -> list[T]:
        return self._meeting.gather(self.rank, own)


@dataclass
class Raw:
    """One sequence as an environment has it; every list has an entry for each token."""

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    reward: float
    mu: NDArray[np.float32]
    ref: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    given: NDArray[np.float32] | None
    teacher: NDArray[np.float32]


@dataclass
class RawGroup:
    name: str
    step: int
    sequences: list[Raw]


def scores(policy: Any, tokens: Sequence[int], temperatures: Sequence[float]) -> Tensor:
    """Return the log-probabilities `(n - 1, V)` of each token but the first, by one sequence alone."""
    logits = policy(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    found: Tensor = (logits / torch.tensor(temperatures[1:], dtype=torch.float64)[:, None]).log_softmax(-1)
    return found


def some_groups(chance: np.random.Generator) -> list[RawGroup]:
    return [some_group(f"g{number}", chance) for number in range(chance.integers(2, 5))]


def some_group(name: str, chance: np.random.Generator) -> RawGroup:
    own_advantages = chance.random() < 0.2
    warm = chance.choice([1.0, 0.5, 1.5])
    flat = chance.random() < 0.2
    made: list[Raw] = []
    for _ in range(chance.integers(2, 5)):
        count = int(chance.integers(3, LONGEST + 1))
        tokens = chance.integers(0, WORDS, count)
        mask = chance.random(count) < 0.6
        mask[-1] |= not made  # a group has at least one trained token
        temperatures = np.full(count, warm, np.float32)
        with torch.no_grad():
            logprobs = scores(POLICY, tokens.tolist(), temperatures.tolist())
        own = np.zeros(count)
        own[1:] = logprobs.gather(-1, torch.from_numpy(tokens[1:, None])).squeeze(-1).numpy()
        far = np.where(chance.random(count) < 0.2, -25.0, 0.0)
        made.append(
            Raw(
                tokens,
                mask,
                0.5 if flat else float(chance.integers(0, 4)) / 4,
                np.minimum(own + 0.3 * chance.standard_normal(count), -1e-3).astype(np.float32),
                np.minimum(own + far + 0.3 * chance.standard_normal(count), -1e-3).astype(np.float32),
                temperatures,
                chance.standard_normal(count).astype(np.float32) if own_advantages else None,
                torch.from_numpy(chance.standard_normal((count, WORDS))).log_softmax(-1).float().numpy(),
            )
        )
    return RawGroup(name, int(chance.integers(0, NOW + 1)), made)


def entries_of(raw: Raw, kind: str) -> list[list[int]]:
    """The tokens of which the teacher told, for each token."""
    if kind == "sampled":
        return [[int(token)] for token in raw.tokens]
    count = TOP_K if kind == "top_k" else WORDS
    return [np.argsort(-row)[:count].tolist() for row in raw.teacher]


def sent(raw: RawGroup, config: TrainerConfig) -> Group:
    """The group as it comes over the bus."""
    rows, kind = raw.sequences, config.distillation.kind
    columns: dict[str, Any] = {}
    if kind != "none":
        ids = [entries_of(row, kind) for row in rows]
        columns["distill_token_ids"] = ids
        columns["distill_logprobs"] = [
            [row.teacher[at][entries] for at, entries in enumerate(each)]
            for row, each in zip(rows, ids, strict=True)
        ]
    if rows[0].given is not None:
        columns["advantages"] = [row.given for row in rows]
    return Group.build(
        raw.name,
        tokens=[row.tokens for row in rows],
        mask=[row.mask for row in rows],
        scores=[row.reward for row in rows],
        oldest=PolicyVersion(0, raw.step),
        inference_logprobs=[row.mu for row in rows],
        ref_logprobs=[row.ref for row in rows],
        temperatures=[row.temperatures for row in rows],
        **columns,
    )


def trained_by(
    groups: Sequence[RawGroup], config: TrainerConfig, seed: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the trainer's step, with ranks and passes drawn at random."""
    chance = np.random.default_rng(seed)
    size = int(chance.integers(1, 4))
    shards: list[list[Group]] = [[] for _ in range(size)]
    for raw in groups:
        shards[chance.integers(size)].append(sent(raw, config))
    meeting, pack = Meeting(size), bool(chance.random() < 0.7)

    def rank(number: int) -> tuple[dict[str, float], Any]:
        needed = (*columns_needed(config.loss), *columns_of_teacher(config.distillation))
        age = PolicyVersion(0, NOW).staleness
        judged = study(shards[number], config, Bounds(WORDS, LONGEST, needed), (), 0, age)
        assert not judged.rejected
        passes = (
            collate(judged.examples, config.micro_batch_tokens, needed, pack=pack) if judged.examples else []
        )
        policy = copy.deepcopy(POLICY)
        scorer = LogprobScorer(policy, 7 * 8 * WORDS)
        metrics = leave_gradient(passes, 1, config, scorer, Threaded(number, meeting), lambda: None)
        return metrics, policy

    with ThreadPoolExecutor(size) as pool:
        ended = list(pool.map(rank, range(size), timeout=DEADLINE_S))
    summed = {name: torch.zeros_like(one) for name, one in POLICY.named_parameters()}
    for _, policy in ended:
        for name, one in policy.named_parameters():
            if one.grad is not None:
                summed[name] += one.grad
    return ended[0][0].get("loss", 0.0), summed


def expected_of(groups: Sequence[RawGroup], config: TrainerConfig) -> tuple[Tensor, dict[str, Tensor]] | None:
    """The same of the oracle; None if nothing is trained."""
    policy, loss, distillation = copy.deepcopy(POLICY), config.loss, config.distillation
    answers: list[oracle.Answer] = []
    taught: list[Tensor] = []
    for raw in groups:
        most = loss.correction.max_staleness
        if most is not None and raw.step < NOW - most:
            continue
        found = judged_by_oracle(raw, loss)
        if found is None and distillation.kind == "none":
            continue
        for row, per_token in zip(raw.sequences, found or [None] * len(raw.sequences), strict=True):
            answer, lessons = scored(policy, row, per_token, NOW - raw.step, distillation.kind)
            taught += lessons
            if found is not None:
                answers.append(answer)
    total = torch.zeros((), dtype=torch.float64)
    if any(len(one.pi) for one in answers):
        total = total + oracle.step_loss(answers, loss)
    if distillation.kind != "none" and taught:
        total = distillation.rl_weight * total + distillation.weight * torch.stack(taught).mean()
    if not total.requires_grad:
        return None
    total.backward()  # type: ignore[no-untyped-call]
    return total, {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in policy.named_parameters()
    }


def judged_by_oracle(raw: RawGroup, loss: LossSection) -> list[NDArray[np.float64] | float | None] | None:
    """The advantages of each sequence, or of each of its tokens; None without a signal."""
    rows = raw.sequences
    if rows[0].given is not None:
        return [np.asarray(row.given, np.float64) for row in rows]
    penalties = [0.0] * len(rows)
    if loss.kl and loss.kl_in == "reward":
        penalties = [
            loss.kl * sum(penalty(row, at, loss.kl_estimator) for at in trained(row)) for row in rows
        ]
    found = oracle.advantages([row.reward for row in rows], penalties, loss)
    return None if found is None else [*found]


def penalty(row: Raw, at: int, estimator: str) -> float:
    distance = torch.tensor(float(row.mu[at]) - float(row.ref[at]), dtype=torch.float64)
    return float(oracle.estimate(distance, estimator))


def trained(row: Raw) -> list[int]:
    """Where tokens are trained: nobody predicts the first."""
    return [at for at in range(1, len(row.tokens)) if row.mask[at]]


def scored(
    policy: Any, row: Raw, per_token: NDArray[np.float64] | float | None, staleness: int, kind: str
) -> tuple[oracle.Answer, list[Tensor]]:
    """One sequence, with gradients, and what the teacher says of each of its trained tokens."""
    places = trained(row)
    whole = scores(policy, row.tokens.tolist(), row.temperatures.tolist())
    own = whole[[at - 1 for at in places]]  # (n, V)
    pi = own[range(len(places)), row.tokens[places].tolist()]

    def chosen(values: Any) -> Tensor:
        return torch.tensor([float(values[at]) for at in places], dtype=torch.float64)

    weights = per_token if isinstance(per_token, np.ndarray) else np.full(len(row.tokens), per_token or 0.0)
    entropy = -(own.exp() * own).sum(-1)
    answer = oracle.Answer(
        pi, entropy, chosen(row.mu), pi.detach(), chosen(row.ref), chosen(weights), staleness
    )
    if kind == "none":
        return answer, []
    ids = entries_of(row, kind)
    lessons = [
        oracle.distilled(
            kind,
            own[n],
            torch.from_numpy(row.teacher[at]).double(),
            torch.tensor(ids[at]),
            int(row.tokens[at]),
            float(row.mu[at]),
        )
        for n, at in enumerate(places)
    ]
    return answer, lessons


def some_config(name: str, teacher: str, chance: np.random.Generator) -> TrainerConfig:
    return TrainerConfig(
        loss=some_section(name, chance),
        micro_batch_tokens=int(chance.choice([1, 20, 40, 1000])),
        distillation={"kind": teacher, "top_k": TOP_K, "rl_weight": 0.5, "weight": 2.0},
    )


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_that_of_the_oracle(name: str, seed: int) -> None:
    agree(name, "none", seed)


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("teacher", ["top_k", "full", "sampled"])
def test_a_step_with_a_teacher_is_that_of_the_oracle(teacher: str, seed: int) -> None:
    agree(list(LOSSES)[seed % len(LOSSES)], teacher, seed)


@pytest.mark.extended
@pytest.mark.parametrize("name", LOSSES)
def test_many_steps_are_those_of_the_oracle(name: str) -> None:
    for seed in range(ROUNDS, 40):
        agree(name, ["none", "none", "top_k", "full", "sampled"][seed % 5], seed)


def agree(name: str, teacher: str, seed: int) -> None:
    chance = np.random.default_rng([seed, *name.encode(), *teacher.encode()])
    config, groups = some_config(name, teacher, chance), some_groups(chance)
    if teacher != "none":  # whose log-probabilities are those of temperature 1
        for row in (row for raw in groups for row in raw.sequences):
            row.temperatures[:] = 1.0
    loss, gradients = trained_by(groups, config, seed)
    expected = expected_of(groups, config)
    told = f"{seed=} {config.loss!r}"
    if expected is None:
        assert not any(one.any() for one in gradients.values()), told
        return
    value, slopes = expected
    exact = EXACT if teacher != "top_k" else COARSE
    assert loss == pytest.approx(value.item(), rel=exact, abs=1e-12), told
    largest = max(float(one.abs().max()) for one in slopes.values())
    for key, slope in slopes.items():
        torch.testing.assert_close(
            gradients[key], slope, rtol=exact, atol=exact * largest, msg=f"{key} {told}"
        )
