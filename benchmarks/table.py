"""The rows that have a goal, as the table of the README: `python -m benchmarks.table` puts it there."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.results import RESULTS

README: Final = Path(__file__).parent.parent / "README.md"
BEGIN: Final = "<!-- table: benchmarks -->\n"
END: Final = "<!-- end of table -->\n"
_HEAD: Final = "| figure | payload | ours | against | ratio | goal | |\n|---|---|---|---|---|---|---|\n"
_BOUNDS: Final = {"ratio, at least": "≥ {}", "ratio, at most": "≤ {}", "ours, at most": "ours ≤ {}"}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows that have a goal as a table in Markdown."""
    return _HEAD + "".join(map(_line, (row for row in rows if row["goal"] is not None)))


def _line(row: Mapping[str, Any]) -> str:
    goal = _BOUNDS[row["bound"]].format(f"{row['goal']:g}")
    rival = f"{row['rival']:,g} ({row['rival_name']})"
    met = "met" if row["met"] else "**unmet**"
    cells = (row["figure"], row["payload"], f"{row['ours']:,g}", rival, f"{row['ratio']:.2f}", goal, met)
    return f"| {' | '.join(cells)} |\n"


def measured() -> str:
    """Return the table of what was measured last."""
    return table(json.loads(RESULTS.read_text())["rows"])


def put_in(text: str, made: str) -> str:
    """Return a text with the table in its place; ValueError if it has no place for one."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(put_in(README.read_text(), measured()))
