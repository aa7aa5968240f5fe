"""Loss, gradient and metrics of a step are the same for any split of it into forward passes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.losses.tokens import PER_TOKEN, SECTIONS, compute, part_of, some_inputs

from rolloutmq.schemas.config.losses import LossSection
from rolloutmq.trainer.losses.inputs import LossInputs

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


def parts(whole: LossInputs, order: list[int], cuts: set[int]) -> list[LossInputs]:
    """The sequences in another order, cut anywhere; a pass without a token is none."""
    edges = sorted({0, len(order), *cuts})
    made = [part_of(whole, order[start:end]) for start, end in pairwise(edges)]
    return [part for part in made if part.logprobs.numel()]


@pytest.mark.parametrize("config", SECTIONS.values(), ids=SECTIONS)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_cut_gives_the_same(config: LossSection, data: st.DataObject) -> None:
    lengths = data.draw(LENGTHS)
    whole = some_inputs(lengths, seed=data.draw(st.integers(0, 99)))
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = data.draw(st.sets(st.integers(0, len(lengths))))
    expected = compute(whole, config)
    leaves = (whole.logprobs, whole.entropy)
    gradients = torch.autograd.grad(expected.loss, leaves, allow_unused=True)

    found = [compute(part, config) for part in parts(whole, order, cuts)]
    total = torch.stack([one.loss for one in found]).sum()
    assert total.item() == pytest.approx(expected.loss.item(), rel=1e-11, abs=1e-13)
    for mine, theirs in zip(torch.autograd.grad(total, leaves, allow_unused=True), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
    for name, value in expected.metrics.items():
        added = sum(one.metrics[name].item() for one in found)
        assert added == pytest.approx(value.item(), rel=1e-11, abs=1e-13), name


@pytest.mark.parametrize("config", SECTIONS.values(), ids=SECTIONS)
def test_a_sequence_that_is_cut_would_be_seen(config: LossSection) -> None:
    """The control: what must not be cut gives something else if it is, where its length or its product matters."""
    whole = some_inputs([6, 3], seed=3)
    halves = [whole.sequences.new_tensor(rows) for rows in ([0, 1, 2], [3, 4, 5, 6, 7, 8])]
    found = sum(compute(cut(whole, half), config).loss.item() for half in halves)
    whole_matters = config.mean == "sequences" or config.correction.level == "sequence"
    same = found == pytest.approx(compute(whole, config).loss.item(), rel=1e-9)
    assert same != whole_matters


def cut(whole: LossInputs, chosen: torch.Tensor) -> LossInputs:
    """Some tokens of a step as a pass, whoever they belong to."""
    fields = {name: getattr(whole, name) for name in PER_TOKEN if getattr(whole, name) is not None}
    return replace(whole, **{name: value[chosen] for name, value in fields.items()})
