"""Teacher columns: inconsistent ones are rejected with a reason, others reach the right tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.support.teacher_answers import said
from tests.trainer.support.toy import some_group

from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.schemas.config.losses import DapoConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.distillation import IDS_COLUMN, LOGPROBS_COLUMN, TOKENIZER_COLUMN
from rolloutmq.trainer.step.advantages import study
from rolloutmq.trainer.step.collate import Bounds, Example, collate
from rolloutmq.trainer.step.collate import find_fault as find_plain_fault
from rolloutmq.trainer.step.teacher_columns import apart, columns_needed, find_fault, shuffled, taught

VOCABULARY = 20
SCORES = (0.0, 1.0, 0.5)
K = 3
TOP = DistillationConfig(kind="top_k", top_k=K)
FULL = DistillationConfig(kind="full")
SAMPLED = DistillationConfig(kind="sampled")
COLUMNS = (IDS_COLUMN, LOGPROBS_COLUMN)


def taught_group(name: str = "g", scores: tuple[float, ...] = SCORES, **changed: Any) -> Group:
    plain = some_group(name, scores)
    return some_group(name, scores, **(said(plain, K, VOCABULARY, seed=len(name)) | changed))


def group_with(**columns: Any) -> Group:
    """The usual group with these columns."""
    return some_group("g", SCORES, **columns)


def test_what_was_sampled_at_another_temperature_is_not_for_a_teacher() -> None:
    mask = group_with()["mask"]
    cold = [[0.5 if m else 1.0 for m in row] for row in mask]
    assert fault(taught_group(temperatures=cold)) == (
        "temperatures: must be 1, the temperature of the teacher's log-probabilities"
    )
    given = [[1.0 if m else 0.5 for m in row] for row in mask]
    assert fault(taught_group(temperatures=given)) == ""


def fault(group: Group, config: DistillationConfig = TOP) -> str:
    bounds = Bounds(VOCABULARY, 16, columns_needed(config))
    return find_plain_fault(group, bounds) or find_fault(group, config, VOCABULARY)


def first_trained(group: Group) -> tuple[int, int]:
    """Return sequence and position of a trained token."""
    flat = int(np.flatnonzero(trained_tokens(group))[0])
    lengths = group.columns["tokens"].lengths[0].tolist()
    sequence = 0
    while flat >= lengths[sequence]:
        flat -= lengths[sequence]
        sequence += 1
    return sequence, flat


def with_entry(ids: Any = None, logprobs: Any = None) -> Group:
    """A group in which the entries of one trained token are others."""
    plain = group_with()
    columns, (sequence, position) = said(plain, K, VOCABULARY), first_trained(plain)
    if ids is not None:
        columns[IDS_COLUMN][sequence][position] = ids
    if logprobs is not None:
        columns[LOGPROBS_COLUMN][sequence][position] = logprobs
    return group_with(**columns)


def test_what_a_teacher_said_is_usable_with_and_without_the_prompts() -> None:
    plain = group_with()
    assert fault(taught_group()) == ""
    assert fault(group_with(**said(plain, K, VOCABULARY, prompts=True))) == ""
    assert fault(taught_group(), SAMPLED) == ""
    assert fault(plain, DistillationConfig()) == ""


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (group_with(), "distill_token_ids: required by the loss"),
        (taught_group(distill_logprobs=None), "distill_logprobs: required by the loss"),
        (
            with_entry([1, 2], [-1.0, -2.0]),
            "distill_token_ids: a trained token has 2 entries, at least 3 expected",
        ),
        (with_entry([], []), "distill_token_ids: a trained token has 0 entries, at least 3 expected"),
        (
            with_entry([1, 2, 3], [-1.0, -2.0]),
            "distill_logprobs: lengths differ from those of distill_token_ids",
        ),
        (with_entry([1, 2, 20]), "distill_token_ids: ids must be from 0 to 19"),
        (with_entry([1, 2, -1]), "distill_token_ids: ids must be from 0 to 19"),
        (with_entry([1, 2, 2]), "distill_token_ids: an id occurs twice at one token"),
        (with_entry([1.0, 2.0, 3.0]), "distill_token_ids: must be integers"),
        (with_entry(logprobs=[-0.1, -0.2, -0.3]), "probabilities must not add up to more than 1 (got 2.464)"),
        (with_entry(logprobs=[-1.0, -2.0, 3.0]), "probabilities must not add up to more than 1"),
        (
            with_entry(logprobs=[-1.0, -2.0, float("-inf")]),
            "distill_logprobs: must be finite at trained tokens",
        ),
        (
            with_entry(logprobs=[-1.0, -2.0, float("nan")]),
            "distill_logprobs: must be finite at trained tokens",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_reason(group: Group, reason: str) -> None:
    assert reason in fault(group)


def test_rows_of_another_length_than_the_tokens_are_refused() -> None:
    columns = said(group_with(), K, VOCABULARY)
    for rows in columns.values():
        rows[0] = rows[0][:-1]
    assert "lengths differ from those of tokens" in fault(group_with(**columns))


def test_what_is_not_trained_is_not_looked_at() -> None:
    plain = group_with()
    columns = said(plain, K, VOCABULARY)
    for odd in ([-7, 10**6], [-7, 10**6, 1, 2, 3, 4, 5, 6, 7]):  # fewer and more than is asked for
        columns[IDS_COLUMN][0][0] = odd
        columns[LOGPROBS_COLUMN][0][0] = [float("nan"), *[5.0] * (len(odd) - 1)]
        group = group_with(**columns)
        assert fault(group) == ""
        assert read([group], TOP) == read([group_with(**said(plain, K, VOCABULARY))], TOP)


def test_a_whole_vocabulary_is_whole() -> None:
    plain = group_with()
    assert fault(group_with(**said(plain, VOCABULARY, VOCABULARY)), FULL) == ""
    assert fault(taught_group(), FULL) == "distill_token_ids: a trained token has 3 entries, 20 expected"
    assert fault(group_with(**said(plain, VOCABULARY, VOCABULARY)), TOP) == "", "the likeliest of it count"


def test_the_sampled_token_must_be_told_of() -> None:
    group = with_entry(ids=[17, 18, 19])
    assert fault(group) == ""
    assert fault(group, SAMPLED) == "distill_token_ids: a trained token is not among its entries"


def read(groups: list[Group], config: DistillationConfig, size: int = 2) -> list[tuple[Any, ...]]:
    """What reaches the loss: the token and what was said in its place, for each trained one."""
    examples = [Example(group, np.zeros(group.tokens, np.float32)) for group in groups]
    told = []
    for one in collate(examples, size, columns_needed(config)):
        found = taught(one, config)
        assert found is not None
        tokens = one.tokens[one.rows, one.positions]
        asked = tokens[:, None] if found.asked is None else found.asked
        prefixes = [one.tokens[r, :p].tolist() for r, p in zip(one.rows, one.positions, strict=True)]
        told += list(
            zip(
                map(tuple, prefixes),
                tokens.tolist(),
                map(tuple, asked.tolist()),
                [tuple(round(x, 5) for x in row) for row in found.logprobs.tolist()],
                strict=True,
            )
        )
    return sorted(told)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_every_trained_token_gets_what_was_said_of_it(size: int) -> None:
    groups = [taught_group("a"), taught_group("bb"), taught_group("ccc")]
    written = []
    for group in groups:
        rows = zip(group["tokens"], group["mask"], group[IDS_COLUMN], group[LOGPROBS_COLUMN], strict=True)
        for tokens, mask, ids, logprobs in rows:
            written += [
                (
                    tuple(tokens[:t].tolist()),
                    int(tokens[t]),
                    tuple(ids[t].tolist()),
                    tuple(round(float(np.float32(x)), 5) for x in logprobs[t]),
                )
                for t in range(1, len(tokens))
                if mask[t]
            ]
    assert read(groups, TOP, size) == sorted(written)


def with_more(group: Group, *, every: int, more: int = 1) -> Group:
    """The group with unlikely further entries at every so many tokens, as vLLM adds the token itself."""
    ids, logprobs = ([[cell.tolist() for cell in row] for row in group[name]] for name in COLUMNS)
    for row, cells in enumerate(ids):
        for position in range(row % every, len(cells), every):
            unused = [one for one in range(VOCABULARY) if one not in cells[position]][:more]
            cells[position][:0] = unused  # in any order
            logprobs[row][position][:0] = [-30.0 - number for number in range(more)]
    return replace(
        group,
        columns={**group.columns, **group_with(**dict(zip(COLUMNS, (ids, logprobs), strict=True))).columns},
    )


@pytest.mark.parametrize(("every", "more"), [(1, 1), (2, 1), (3, 2)])
def test_of_more_entries_than_asked_for_the_likeliest_count(every: int, more: int) -> None:
    """vLLM gives `top_k` prompt log-probabilities, and that of the token itself if it is not among them."""
    config = TrainerConfig(distillation=TOP)
    bounds = Bounds(VOCABULARY, 16, columns_needed(TOP))
    plain = taught_group("g")
    (example,) = study([with_more(plain, every=every, more=more)], config, bounds, (), 0).examples
    assert read([example.group], TOP) == read([plain], TOP)
    control = config.model_copy(update={"distillation": TOP.model_copy(update={"shuffle_teacher": True})})
    assert len(study([with_more(plain, every=every)], control, bounds, (), 0).examples) == 1


def test_of_the_sampled_token_its_own_log_probability_is_taken() -> None:
    groups = [taught_group("a"), taught_group("bb")]
    alone = [(prefix, token, (token,), (told[-1],)) for prefix, token, _, told in read(groups, TOP)]
    assert read(groups, SAMPLED) == alone


@pytest.mark.parametrize("config", [TOP, SAMPLED])
def test_shuffled_means_the_same_things_in_other_places(config: DistillationConfig) -> None:
    group = taught_group("a")
    moved = shuffled(group, config, seed=1)
    assert fault(moved, config) == ""
    before, after = read([group], config), read([moved], config)
    assert before != after
    assert sorted(one[-1] for one in before) == sorted(one[-1] for one in after)
    assert [one[:2] for one in before] == [one[:2] for one in after]
    assert read([shuffled(group, config, seed=1)], config) == after


def test_scores_are_told_apart() -> None:
    scores = torch.arange(6.0).view(2, 3)
    own, others = apart(scores, torch.zeros(2, 2))
    assert own.tolist() == [0.0, 3.0]
    assert others.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    own, others = apart(scores[:, 0], None)
    assert others.tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize(("weight", "learned"), [(1.0, 1), (0.0, 0)])
def test_without_a_spread_of_rewards_there_is_the_teacher(weight: float, learned: int) -> None:
    config = TrainerConfig(
        loss=DapoConfig(), distillation=DistillationConfig(kind="top_k", top_k=K, weight=weight)
    )
    bounds = Bounds(VOCABULARY, 16, columns_needed(config.distillation))
    lesson = study([taught_group("a", (0.5, 0.5, 0.5))], config, bounds, (), 0)
    assert len(lesson.examples) == learned
    assert len(lesson.filtered) == 1 - learned
    if learned:
        assert not lesson.examples[0].advantages.any()


def test_a_group_without_a_teacher_is_rejected_where_one_is_learned_from() -> None:
    config = TrainerConfig(distillation=TOP)
    bounds = Bounds(VOCABULARY, 16, columns_needed(TOP))
    groups = [some_group("a", (0.0, 1.0)), taught_group("b")]
    lesson = study(groups, config, bounds, (), 0)
    assert [one.group_id for one in lesson.rejected] == ["a"]
    assert [group.group_id for group in lesson.trained] == ["b"]


@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_a_teacher_of_another_tokenizer_is_rejected_and_both_are_named(kind: Any) -> None:
    asked = DistillationConfig(kind=kind, top_k=K)
    mine, other = "a" * 64, "b" * 64
    groups = [
        taught_group("same", distill_tokenizer=[mine] * len(SCORES)),
        taught_group("once", distill_tokenizer=mine),
        taught_group("silent"),
        taught_group("other", distill_tokenizer=[other] * len(SCORES)),
        taught_group("last", distill_tokenizer=[mine, mine, other]),
        taught_group("empty", distill_tokenizer=""),
        taught_group("odd", distill_tokenizer=[7]),
    ]
    bounds = Bounds(VOCABULARY, 16, columns_needed(asked), mine)
    lesson = study(groups, TrainerConfig(distillation=asked), bounds, (), 0)
    assert [group.group_id for group in lesson.trained] == ["same", "once", "silent"]

    def unlike(theirs: str, own: str) -> str:
        fingerprints = f"(got fingerprint {theirs}, the student has {own})"
        return (
            f"teacher: its tokenizer differs from the student's {fingerprints}; "
            "use a teacher with the student's tokenizer"
        )

    both = unlike(other[:16], mine[:16])
    assert {one.group_id: one.reason for one in lesson.rejected} == {
        "other": both,
        "last": both,
        "empty": unlike("none", mine[:16]),
        "odd": f"{TOKENIZER_COLUMN}: must be a tokenizer fingerprint",
    }
    untold = Bounds(VOCABULARY, 16, columns_needed(asked))
    (reason,) = study(groups[:1], TrainerConfig(distillation=asked), untold, (), 0).rejected
    assert reason.reason == unlike(mine[:16], "none")
    assert len(study(groups, TrainerConfig(), bounds, (), 0).trained) == len(groups)  # nobody reads them
