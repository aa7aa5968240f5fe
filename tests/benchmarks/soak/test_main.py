from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.plan import Act
from benchmarks.soak.stage import Performance, Tally


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Violations of the acts to come, one after another, without playing them."""
    wanted: list[list[str]] = []

    class Pretended:
        def __init__(self, act: Act, root: Path, tally: Tally, report: Callable[[int, str], None]) -> None:
            self.act, self.tally, self.report = act, tally, report
            (root / "file").touch()

        def play(self) -> list[str]:
            self.report(5, "nobody waits")
            self.tally.groups += self.act.groups
            self.tally.kills += self.act.kills
            return wanted.pop(0)

    monkeypatch.setattr(soak, "Performance", Pretended)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    yield wanted
    assert wanted == []


def run(where: Path, *words: str) -> int:
    return soak.main(["--groups", "30", "--kills", "6", "--seed", "7", "--dir", str(where), *words])


def test_a_soak_where_everything_holds_ends_with_0(
    outcomes: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes += [[], [], []]
    assert run(tmp_path / "runs") == 0
    said = capsys.readouterr().out
    assert "soak groups=30 kills=6 seed=7" in said
    assert "nothing lost, nothing twice, nothing torn: 30 groups settled" in said
    assert "15 groups" in said  # the second act begins with the ten of the first
    assert not (tmp_path / "runs").exists()


def test_a_violation_ends_with_1_and_keeps_the_files(
    outcomes: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes += [[], ["lost: p0.0-7 was acked"]]
    assert run(tmp_path / "runs") == 1
    said = capsys.readouterr().out
    assert "VIOLATED in act 1, seed 7" in said
    assert "lost: p0.0-7 was acked" in said
    (kept,) = (tmp_path / "runs").iterdir()
    assert (kept / "file").exists()
    assert str(kept) in said


@pytest.mark.parametrize(
    "words", [("--groups", "0"), ("--kills", "-1"), ("--groups", "many"), ("--nothing",)]
)
def test_what_is_no_number_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, *words)
    assert ended.value.code == 2


def test_an_interrupted_soak_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(Performance, "play", interrupt)
    assert run(tmp_path / "runs") == 1
    assert "INTERRUPTED: 0 groups" in capsys.readouterr().out
    assert list((tmp_path / "runs").iterdir()) == []
