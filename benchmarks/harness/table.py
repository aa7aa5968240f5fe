"""Tables of the measured rows: all with a goal in `docs/performance.md`, six of them in the README.

`python -m benchmarks.harness.table` writes both.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.results import RESULTS
from benchmarks.harness.row import shown_ratio

ROOT: Final = Path(__file__).parents[2]
README: Final = ROOT / "README.md"
PERFORMANCE: Final = ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- table: benchmarks -->\n"
BEGIN_SHORT: Final = "<!-- table: benchmarks-short -->\n"
SHORT: Final = (
    ("journal, MB/s, disk", "1024 MiB in records of 256 KiB"),
    ("groups/s from an environment's lists to the trainer, memory", "groups of 8 x 2,048 tokens, 147 kB"),
    ("samples/s, single puts, memory", "samples of 26.6 kB"),
    ("pull of 8 groups, ms, memory", "100,000 groups of 8 x 13 tokens, 0.936 kB queued"),
    ("trained tokens/s of a trainer's step, CPU", "16 completions of 192 tokens, 32,000 words"),
    ("trajectories/s over HTTP, gzip, memory", "groups of 8 x 2,048 tokens, 147 kB"),
)
"""Figure and payload of the rows in the README."""
END: Final = "<!-- end of table -->\n"
_HEAD: Final = "| figure | payload | ours | against | ratio | goal | |\n|---|---|---|---|---|---|---|\n"
_BOUNDS: Final = {
    "ratio, at least": "≥ {}",
    "ratio, at most": "≤ {}",
    "ours, at least": "ours ≥ {}",
    "ours, at most": "ours ≤ {}",
    "ours, below": "ours < {}",
}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows with a goal as a Markdown table."""
    return _HEAD + "".join(map(_line, (row for row in rows if row["goal"] is not None)))


def _line(row: Mapping[str, Any]) -> str:
    goal = _BOUNDS[row["bound"]].format(f"{row['goal']:g}")
    rival = f"{row['rival']:,g} ({row['rival_name']})"
    met = "met" if row["met"] else "**unmet**"
    ratio = shown_ratio(row["ratio"], row.get("spread"))
    cells = (row["figure"], row["payload"], f"{row['ours']:,g}", rival, ratio, goal, met)
    return f"| {' | '.join(cells)} |\n"


def measured() -> list[dict[str, Any]]:
    """Return the rows that were measured last."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
    return rows


def short(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of the README, in its order; KeyError if one was never measured."""
    by_name = {(row["figure"], row["payload"]): row for row in rows}
    return [by_name[name] for name in SHORT]


def put_in(text: str, made: str, begin: str = BEGIN) -> str:
    """Return a text with the table in its place; ValueError if it has no place for one."""
    before, marker, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"there is no {begin.strip()} ... {END.strip()}")
    return f"{before}{begin}\n{made}\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the pages with their tables as they should be."""
    rows = measured()
    return {
        README: put_in(README.read_text(), table(short(rows)), BEGIN_SHORT),
        PERFORMANCE: put_in(PERFORMANCE.read_text(), table(rows)),
    }


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
