"""Completion of names in a shell: runs, and the environments, workers and logs of a run.

The names come from the files of a run alone: no process is asked, and what cannot be read has no names. Without
`--run-dir` on the line, those of the newest run below `runs/` are offered.
"""

from pathlib import Path
from typing import Any, Final

import typer

RUNS: Final = Path("runs")
FIRST_ENGINE: Final = "inference"


def runs(incomplete: str) -> list[str]:
    """Return the run directories that begin so, the newest first: below `runs/`, and below the typed directory."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    found = {f"{RUNS}/{run.name}": run for run in _found(RUNS)}
    found |= {f"{typed}{run.name}": run for run in _found(Path(typed or "."))}
    return sorted((name for name in found if name.startswith(incomplete)), key=lambda name: _age(found[name]))


def environments(context: typer.Context, incomplete: str) -> list[str]:
    """Return the environments of the run that begin so, and `inference`."""
    names = [*_section(context, "environment"), FIRST_ENGINE]
    return [name for name in names if name.startswith(incomplete)]


def workers(context: typer.Context, incomplete: str) -> list[str]:
    """Return the workers of the run that begin so."""
    found = _read(_run(context), "workers.json")
    names = [one.get("name") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return sorted(name for name in names if isinstance(name, str) and name.startswith(incomplete))


def logs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the logs of the run that begin so."""
    run = _run(context)
    names = [] if run is None else [path.stem for path in (run / "logs").glob("*.log")]
    return sorted(name for name in names if name.startswith(incomplete))


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


def _read(run: Path | None, name: str) -> Any:
    """Return what a file of a run has, unchecked; None if it cannot be read."""
    if run is None:
        return None
    import json

    from rolloutmq.bus.files import read_regular

    try:
        return json.loads(read_regular(run / name))
    except (OSError, ValueError, RecursionError):
        return None
