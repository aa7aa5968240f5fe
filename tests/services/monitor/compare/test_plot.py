"""The picture is drawn from whatever the runs left."""

import itertools
import sys
from pathlib import Path

import pytest
from tests.services.monitor.report.test_plot import size_of

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError
from rolloutmq.services.monitor.compare.compared_run import ComparedRun, Points, compared
from rolloutmq.services.monitor.compare.plot import HEIGHT_PX, WIDTH_PX, draw, thinned
from rolloutmq.services.monitor.liveness import Fate, RunLiveness


def run(root: Path, steps: int) -> ComparedRun:
    line = Points(
        range(1, steps + 1), [0.5 * step for step in range(steps)], [step / 10 for step in range(steps)]
    )
    empty = compared(root, RunConfig(), Fate(RunLiveness.ENDED), {})
    return empty._replace(reward=line, throughput=line, staleness=line)


def test_runs_of_any_length_and_name_are_drawn(tmp_path: Path) -> None:
    names = ("$x^2$", "_hidden", "\u202e\x1b", "a" * 200, *map(str, range(8)))
    runs = [
        run(tmp_path / name, steps) for name, steps in zip(names, itertools.cycle([0, 1, 5000]), strict=False)
    ]
    draw(runs, tmp_path / "all.png")
    assert size_of(tmp_path / "all.png") == (WIDTH_PX, HEIGHT_PX)
    draw([run(tmp_path, 0)], tmp_path / "none.png")
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "none.png").stat().st_size + 5000


def test_long_series_are_thinned_to_their_ends() -> None:
    assert thinned([1, 2, 3], 3) == [1, 2, 3]
    found = thinned(range(10_000), 100)
    assert (found[0], found[-1], len(found)) == (0, 9_999, 100)


def test_without_matplotlib_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingError, match=r"rolloutmq\[report\]"):
        draw([run(tmp_path, 3)], tmp_path / "x.png")
