"""The table says what the comparison says, and what it cannot know."""

import random

from tests.services.monitor.report.test_bias import by_chance, join, make, simulate

from rolloutmq.services.monitor.report.bias import Bias, BiasVerdict, Comparison
from rolloutmq.services.monitor.report.bias_table import SHOWN, table, verdict_line


def test_bias_is_said_with_its_reason_and_its_shares() -> None:
    bias = simulate(lambda group, _: "expired" if group.length > 300 else "trained")
    lines = list(table(bias))
    assert lines[0].startswith("sort3: ")
    assert " expired" in lines[0]
    (length,) = [line for line in lines if line.startswith("  length")]
    assert "trained: BIASED (p" in length
    assert "from the lowest part to the highest" in length
    shares = [line for line in lines if "groups   trained" in line]
    assert len(shares) == sum(len(found.bins) for found in bias.environments["sort3"].dimensions.values())
    assert "trained 100.0%" in shares[0]
    assert "expired" in shares[3]
    assert verdict_line(bias).startswith("shows: sort3 by length (trained, expired)")


def test_what_is_missing_is_said() -> None:
    dice = random.Random(1)
    bias = join([(make(dice), "lost"), (make(dice, "other"), "trained"), (None, "in_flight")])
    told = "\n".join(table(bias))
    assert "not in the shares: 1 groups" in told
    assert "(1 in flight): neither an ack log nor the journal describes them" in told
    assert "between environments: nothing to compare" in told
    assert "not recorded: rollouts that the broker never accepted" in told
    assert verdict_line(bias).startswith("too few")


def test_lines_of_nothing_and_of_no_bias() -> None:
    empty = Bias({}, Comparison(BiasVerdict.TOO_FEW), 3, {})
    assert [line.split(":")[0] for line in table(empty)] == ["left out", "not recorded"]
    assert verdict_line(empty).startswith("too few")
    assert verdict_line(simulate(by_chance)) == "no bias found"


def test_bias_of_the_filter_alone_is_called_one_that_is_meant() -> None:
    bias = simulate(lambda group, _: "filtered" if group.reward > 0.8 else "trained")
    assert verdict_line(bias).startswith("only by the filter")


def test_of_a_thousand_environments_some_have_a_table_and_the_biased_one_is_among_them() -> None:
    """It had 10,300 lines."""
    dice = random.Random(2)
    groups = [(make(dice, f"env-{number}"), "trained") for number in range(1000) for _ in range(2)]
    many = simulate(lambda group, _: "expired" if group.length > 300 else "trained")
    bias = join(groups)
    bias.environments["sort3"] = many.environments["sort3"]
    lines = list(table(bias))
    heads = [line for line in lines if line.startswith(("env-", "sort3: "))]
    assert len(heads) == SHOWN
    assert any(line.startswith("sort3: ") for line in heads)
    assert f"and {1001 - SHOWN} more environments; the biased ones come first, `--json` has all" in lines
