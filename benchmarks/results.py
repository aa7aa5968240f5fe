"""`results.json`: the rows that were measured on one machine, and what machine that was."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.row import Row

RESULTS: Final = Path(__file__).parent / "results.json"


def keep(rows: Iterable[Row], *, path: Path = RESULTS, whole: bool) -> None:
    """Write rows down.

    Args:
        path: Where to.
        whole: They are all there are. Otherwise each takes the place of the row that measured the same, and the
            others stay, unless they are another machine's.
    """
    machine = this_machine()
    found = [] if whole else _rows_of(path, machine)
    kept = {(row["figure"], row["payload"], row["rival_name"]): row for row in found}
    for row in rows:
        kept[row.key] = asdict(row)
    path.write_text(json.dumps({"machine": machine, "rows": list(kept.values())}, indent=1) + "\n")


def this_machine() -> dict[str, Any]:
    """Say what the figures depend on, as far as this process can tell."""
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
