"""Completion of names in a shell: runs, and the environments, workers, logs, topics and groups of a run.

The names come from the files of a run, or of its configuration, alone: no process is asked, and what cannot be read has
no names. A shell reads a name a line, so a name with a line break or another control character is not offered. Without
`--run-dir` on the line, those of the newest run below `runs/` are offered.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import typer

RUNS: Final = Path("runs")
FIRST_ENGINE: Final = "inference"
TAIL_BYTES: Final = 1 << 18
"""End of a log that is searched for names: a shell waits for them."""
GROUPS: Final = 100
"""Most groups that are offered, the newest."""


def runs(incomplete: str) -> list[str]:
    """Return the run directories that begin so, the newest first: below `runs/`, and below the typed directory."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    found = {f"{RUNS}/{run.name}": run for run in _found(RUNS)}
    found |= {f"{typed}{run.name}": run for run in _found(Path(typed or "."))}
    return sorted(_offered(found, incomplete), key=lambda name: _age(found[name]))


def environments(context: typer.Context, incomplete: str) -> list[str]:
    """Return the environments of the run that begin so, and `inference`."""
    names = [*_section(context, "environment"), FIRST_ENGINE]
    return list(_offered(names, incomplete))


def configured(context: typer.Context, incomplete: str) -> list[str]:
    """Return the environments that begin so: of the configuration that the line names, else of the run."""
    files = [
        value for value in context.params.values() if isinstance(value, Path) and value.suffix == ".toml"
    ]
    names = _environments_of(files[0]) if files else _section(context, "environment")
    return list(_offered(names, incomplete))


def topics(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin so: those of every run, and what the run recorded last."""
    from rolloutmq.bus.encoding.topics import HEADS

    recorded = (line.get("topic") for line in _last_lines(_run(context), "metrics.jsonl"))
    names = {*HEADS, *(name for name in recorded if isinstance(name, str))}
    return sorted(_offered(names, incomplete))


def groups(context: typer.Context, incomplete: str) -> list[str]:
    """Return the groups that begin so, of those that were settled or dropped last; of each log the newest first."""
    found: dict[str, None] = {}
    for log in ("trained.jsonl", "settled.jsonl", "dropped.jsonl"):
        for line in reversed(_last_lines(_run(context), log)):
            found |= dict.fromkeys([line["group_id"]] if isinstance(line.get("group_id"), str) else [])
            for outcome in ("trained", "filtered", "rejected"):
                names = line.get(outcome)
                found |= dict.fromkeys(map(str, names) if isinstance(names, list) else ())
    return list(islice(_offered(found, incomplete), GROUPS))


def workers(context: typer.Context, incomplete: str) -> list[str]:
    """Return the workers of the run that begin so."""
    found = _read(_run(context), "workers.json")
    names = [one.get("name") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return sorted(_offered((name for name in names if isinstance(name, str)), incomplete))


def logs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the logs of the run that begin so."""
    run = _run(context)
    names = [] if run is None else [path.stem for path in (run / "logs").glob("*.log")]
    return sorted(_offered(names, incomplete))


def _offered(names: Iterable[str], incomplete: str) -> Iterator[str]:
    """Yield the names that begin so and that a line of a shell can have."""
    return (name for name in names if name.startswith(incomplete) and name.isprintable())


def _found(folder: Path) -> list[Path]:
    """Return the run directories in a directory."""
    try:
        return [path.parent for path in folder.glob("*/config.json")]
    except OSError:
        return []


def _age(run: Path) -> float:
    try:
        return -(run / "config.json").stat().st_mtime
    except OSError:
        return 0.0


def _run(context: typer.Context) -> Path | None:
    """Return the run that the line names so far, else the newest."""
    for value in context.params.values():
        if isinstance(value, Path):
            return value
    return min(_found(RUNS), key=_age, default=None)


def _section(context: typer.Context, name: str) -> list[str]:
    found = _read(_run(context), "config.json")
    section = found.get(name) if isinstance(found, dict) else None
    return sorted(section) if isinstance(section, dict) else []


def _environments_of(file: Path) -> list[str]:
    try:
        section = tomllib.loads(file.read_text("utf-8")).get("environment")
    except (OSError, ValueError, RecursionError):
        return []
    return sorted(section) if isinstance(section, dict) else []


def _last_lines(run: Path | None, name: str) -> list[dict[str, Any]]:
    """Return the last lines of a log of a run, unchecked; those that do not decode are left out."""
    if run is None:
        return []
    from rolloutmq.bus.files import open_regular

    try:
        with open_regular(run / name) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read(TAIL_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]


def _read(run: Path | None, name: str) -> Any:
    """Return what a file of a run has, unchecked; None if it cannot be read."""
    if run is None:
        return None
    from rolloutmq.bus.files import read_regular

    try:
        return json.loads(read_regular(run / name))
    except (OSError, ValueError, RecursionError):
        return None
