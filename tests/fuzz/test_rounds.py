"""A short round of each fuzzer, and the promises of the fuzzers themselves: what they find can be met again."""

import random
import time
from pathlib import Path

import pytest
from tests.fuzz import __main__ as fuzz
from tests.fuzz.campaign import BrokenError, Fuzzer, TooLargeError, TooSlowError, light, run, source, within
from tests.fuzz.recovery.damage import damaged
from tests.fuzz.recovery.runs import runs

SEED = 7
ROUNDS = {"decoders": 500, "recovery": 30, "gateway": 150, "run-directory": 30}
"""Inputs of a short round, some seconds each."""


@pytest.mark.parametrize("name", ROUNDS)
def test_a_short_round_breaks_nothing(name: str) -> None:
    with fuzz.FUZZERS[name]() as fuzzer:
        count, _ = run(fuzzer, SEED, inputs=ROUNDS[name])
    assert count == ROUNDS[name]


class Thirteen(Fuzzer):
    """Finds every thirteenth number wrong."""

    name = "thirteen"

    def attempt(self, rng: random.Random) -> str:
        self._number = rng.randrange(13)
        assert self._number
        return ""

    def keep(self, directory: Path) -> str:
        (directory / "number").write_text(str(self._number))
        return f"number {self._number}"


def test_a_defect_is_told_with_what_meets_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "FUZZERS", {"thirteen": Thirteen})
    assert fuzz.main(["thirteen", "60", "3"]) == 1
    told = capsys.readouterr().out
    assert "AssertionError" in told
    again = next(line for line in told.splitlines() if line.startswith("again: python -m tests.fuzz "))
    assert fuzz.main(again.removeprefix("again: python -m tests.fuzz ").split()) == 1
    kept = next(line for line in told.splitlines() if line.startswith("input: ")).split()
    assert Path(kept[1].rstrip(":"), "number").read_text() == "0"


def test_an_input_depends_on_its_seed_and_number_alone() -> None:
    one = Thirteen()
    with pytest.raises(BrokenError) as found:
        run(one, SEED)
    with pytest.raises(BrokenError) as again:
        run(Thirteen(), SEED, inputs=1, first=found.value.number)
    assert again.value.number == found.value.number
    tree = runs()[0].tree
    both = [damaged(tree, source(SEED, 5)) for _ in range(2)]
    assert both[0] == both[1]


def test_names_and_numbers_choose_what_is_fuzzed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.parsed([]) == (list(fuzz.FUZZERS), fuzz.DEFAULT_S, None, None)
    assert fuzz.parsed(["gateway", "recovery", "0.5", "3"]) == (["gateway", "recovery"], 0.5, 3, None)
    assert fuzz.parsed(["5", "3", "2"]) == (list(fuzz.FUZZERS), 5.0, 3, 2)
    assert fuzz.main(["nothing"]) == 2
    assert "unknown fuzzer" in capsys.readouterr().err


def test_a_round_by_command_says_how_many_inputs_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["decoders", "0.3", "1"]) == 0
    assert "decoders: seed 1: " in capsys.readouterr().out


def test_what_takes_too_long_or_too_much_is_a_defect() -> None:
    with pytest.raises(TooSlowError), within(0.05):
        time.sleep(30.0)
    with pytest.raises(TooLargeError), light(1 << 20):
        bytearray(b"x") * (64 << 20)
    with within(30.0), light(64 << 20):
        bytearray(b"x") * (1 << 20)
