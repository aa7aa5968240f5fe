"""A comparison as lines for a person and as JSON objects. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.compare.compared_run import ComparedRun, Course
from rolloutmq.services.monitor.compare.config_keys import differing, value_text
from rolloutmq.services.monitor.liveness import RunLiveness
from rolloutmq.services.monitor.report.latencies import GROUP_HOPS, LatencyKey, Percentiles, plain
from rolloutmq.services.monitor.text import format

CELL_LIMIT: Final = 40
"""Most characters of a cell: a value of a configuration may be a page."""
NOTHING: Final = "-"


class Failed(NamedTuple):
    """A run that cannot be compared, and why."""

    run_dir: str
    problem: str


def names(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a short name of each run: as many last parts of its path as tell all of them apart."""
    paths = [one.run_dir.absolute().parts for one in runs]
    found: list[str] = []
    for depth in range(1, max(map(len, paths)) + 1):
        found = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(found)) == len(set(paths)):
            break
    return [name if len(name) <= CELL_LIMIT else f"…{name[1 - CELL_LIMIT :]}" for name in found]


def comparison_json(runs: Sequence[ComparedRun], failed: Sequence[Failed]) -> dict[str, Any]:
    """Return a comparison as plain data; times in seconds, parts from 0 to 1, null where nothing is known."""
    return {
        "runs": [_run_json(one) for one in runs],
        "config": differing([one.config for one in runs]) if runs else {},
        "failed": [one._asdict() for one in failed],
    }


def _run_json(run: ComparedRun) -> dict[str, Any]:
    return {
        "run_dir": str(run.run_dir),
        "name": run.config.run.name,
        "life": run.fate.life,
        "ended": run.fate.told,
        **run.counts,
        "groups_per_s": run.per_s("groups_accepted"),
        "tokens_per_s": run.per_s("tokens"),
        "starved_of_run": run.starved_of_run,
        "starved": run.starved,
        "blocked": run.blocked,
        "rewards": {env: one._asdict() for env, one in run.rewards.items()},
        "evaluation": dict(zip(("first", "last"), run.evaluation, strict=True)),
        "latencies": plain(run.latencies),
        "notes": list(run.notes),
    }


def lines(runs: Sequence[ComparedRun], failed: Sequence[Failed]) -> Iterator[str]:
    """Yield a comparison as lines: figures, keys that differ, and what a reader must know."""
    if runs:
        yield from _aligned([("", *names(runs)), *_figures(runs)])
        config = differing([one.config for one in runs])
        yield ""
        yield "configuration" if config else "configuration: the same"
        rows = [(f"  {key}", *map(value_text, values)) for key, values in config.items()]
        yield from _aligned(rows)
    notes = [f"{name}: {note}" for name, run in zip(names(runs), runs, strict=True) for note in run.notes]
    notes += _other_environments(runs)
    notes += [f"not compared: {one.run_dir}: {one.problem}" for one in failed]
    if notes:
        yield ""
        yield from map(printable, notes)


def _other_environments(runs: Sequence[ComparedRun]) -> list[str]:
    trained = [{env for env, own in run.config.environment.items() if own.split == "train"} for run in runs]
    if all(envs == trained[0] for envs in trained):
        return []
    each = "; ".join(
        f"{name}: {', '.join(sorted(envs)) or 'none'}"
        for name, envs in zip(names(runs), trained, strict=True)
    )
    return [f"the runs train on other environments, so totals do not compare: {each}"]


def _figures(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each figure that a run has."""

    def row(label: str, read: Callable[[ComparedRun], Any], write: Callable[[Any], str]) -> tuple[str, ...]:
        values = [read(run) for run in runs]
        return (label, *(NOTHING if value is None else write(value) for value in values))

    rows = [
        row("ended", lambda run: "goes on" if run.fate.life is RunLiveness.LIVING else run.fate.told, str),
        row("wall time", _counted("wall_s"), format.clock),
        row("steps", _counted("steps"), _count),
        row("steps/s", _counted("steps_per_s"), _digits),
    ]
    states = ("accepted", "trained", "filtered", "expired", "dead", "lost")
    rows += [row(f"groups {state}", _counted(f"groups_{state}"), _count) for state in states]
    rows += [
        row("groups/s", lambda run: run.per_s("groups_accepted"), _digits),
        row("tokens", _counted("tokens"), _count),
        row("tokens/s", lambda run: run.per_s("tokens"), _count),
        row("trainer starved, whole run", lambda run: run.starved_of_run, _part),
        row("trainer starved, from first batch", lambda run: run.starved, _part),
        row("workers blocked, from first batch", lambda run: run.blocked, _part),
        row(
            "staleness, at most",
            lambda run: run.counts["staleness_max"] if run.counts["steps"] else None,
            _count,
        ),
        row("staleness, bound", _counted("staleness_bound"), _count),
    ]
    envs = dict.fromkeys(env for run in runs for env in run.rewards)
    rows += [row(f"reward {env}", _rewarded(env), _course) for env in envs]
    rows.append(row("evaluation", lambda run: None if run.evaluation[1] is None else run.evaluation, _scores))
    rows += [row(f"{key.env} {key.hop.value}, p50 / p99", _took(key), _times) for key in _latency_keys(runs)]
    yield from (cells for cells in rows if any(cell != NOTHING for cell in cells[1:]))


def _counted(name: str) -> Callable[[ComparedRun], float | None]:
    return lambda run: run.counts[name]


def _rewarded(env: str) -> Callable[[ComparedRun], Course | None]:
    return lambda run: run.rewards.get(env)


def _took(key: LatencyKey) -> Callable[[ComparedRun], Percentiles | None]:
    return lambda run: run.latencies.get(key)


def _latency_keys(runs: Sequence[ComparedRun]) -> list[LatencyKey]:
    keys = {key for run in runs for key in run.latencies if key.split is Split.TRAIN}
    return sorted(keys, key=lambda key: (key.env, GROUP_HOPS.index(key.hop)))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _digits(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _part(value: float) -> str:
    return f"{value:.1%}"


def _course(value: Course) -> str:
    return f"{value.first:.3f} -> {value.last:.3f}, best {value.best:.3f}"


def _scores(value: tuple[float | None, float]) -> str:
    first, last = value
    return f"{last:.3f}" if first is None else f"{first:.3f} -> {last:.3f}"


def _times(value: Percentiles) -> str:
    return f"{format.seconds(value.p50_s)} / {format.seconds(value.p99_s)}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows of cells, the first aligned to the left and the others to the right; long ones are cut."""
    cells = [[_cut(printable(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *others = row
        placed = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *placed]).rstrip()


def _cut(cell: str) -> str:
    return cell if len(cell) <= CELL_LIMIT else cell[: CELL_LIMIT - 1] + "…"
