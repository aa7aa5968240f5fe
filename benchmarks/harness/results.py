"""`results.json`: the rows measured on one machine, and its description."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.row import Row

RESULTS: Final = Path(__file__).parents[1] / "results.json"


def keep(rows: Iterable[Row], *, path: Path = RESULTS, whole: bool) -> None:
    """Save rows.

    Args:
        path: Result file.
        whole: The rows are complete. Otherwise each replaces the row of the same measurement, and the others stay,
            unless another machine measured them.
    """
    machine = this_machine()
    found = [] if whole else _rows_of(path, machine)
    kept = {(row["figure"], row["payload"], row["rival_name"]): row for row in found}
    for row in rows:
        kept[row.key] = asdict(row)
    path.write_text(json.dumps({"machine": machine, "rows": list(kept.values())}, indent=1) + "\n")


def this_machine() -> dict[str, Any]:
    """Return the properties of this machine that affect the figures, as far as known."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def _rows_of(path: Path, machine: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return list(found["rows"]) if found["machine"] == machine else []
