"""A report: the page of a run with its data at one moment, as one file to keep or to send.

It holds what the page shows: also text of dead letters and of logs. What has no bound by itself is cut at the counts
below.
"""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.files import private_file
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.dashboard.crew import page_of
from rolloutmq.services.dashboard.dead_letters import DeadLetters
from rolloutmq.services.dashboard.page.single_file import single_file
from rolloutmq.services.dashboard.record.latency_parts import PARTS
from rolloutmq.services.dashboard.stream import encoded_json, history_since
from rolloutmq.services.dashboard.watch import Watch

WORKERS_LIMIT: Final = 1000
LATENCIES_LIMIT: Final = 100
"""Rows of each hop by worker, host, engine and GPU: the slowest."""
LETTERS_LIMIT: Final = 100
CONTENTS_LIMIT: Final = 20
"""Dead letters of which the report holds the contents: the newest."""
SEQUENCES_LIMIT: Final = 8
PRESSURE_S: Final = 3.0
"""Longest wait for the state of a run that lives; its broker publishes four times a second."""
LOOK_S: Final = 0.05


def write_page(run_dir: Path, to: Path) -> None:
    """Write the report of a run to a file. Blocks for some seconds, longer for a long record.

    Raises:
        OSError: The file cannot be written.
    """
    data = asyncio.run(_collect(run_dir.resolve()))
    with private_file(to, "wb") as file:
        file.write(single_file(encoded_json(data)))


async def _collect(root: Path) -> dict[str, Any]:
    layout = RunLayout(root)
    watch = Watch(layout)
    try:
        async with watch.viewed():
            state = await _whole_state(watch)
            letters, contents = _dead(layout, watch)
            return {
                "written": f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}: values as of then.",
                "state": state,
                "history": history_since(watch.update(), None),
                "workers": page_of(
                    watch.crew, sort="worker", descending=False, wanted="", offset=0, limit=WORKERS_LIMIT
                )["rows"],
                "latencies": {by: watch.record.latency_parts.page(by, "", LATENCIES_LIMIT) for by in PARTS},
                "dead": letters,
                "dead_groups": contents,
            }
    finally:
        await watch.close()


async def _whole_state(watch: Watch) -> dict[str, Any]:
    """Return the state once the record is read and, of a run that lives, its pressure has come."""
    began = time.monotonic()
    while True:
        state: dict[str, Any] = json.loads(watch.state())
        is_loaded = (state.get("record") or {}).get("loaded", 1.0) == 1.0
        is_told = bool(state.get("queue")) or (state.get("run") or {}).get("life") != "living"
        if is_loaded and (is_told or time.monotonic() - began > PRESSURE_S):
            return state
        await asyncio.sleep(LOOK_S)


def _dead(layout: RunLayout, watch: Watch) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the newest dead letters as rows, and the contents of the first of them by group."""
    reader = DeadLetters(layout)
    rows: list[dict[str, Any]] = []
    contents: dict[str, Any] = {}
    # A damaged letter is a row that says so; what cannot be read at all leaves the rest of the report.
    with contextlib.suppress(RolloutMQError, OSError):
        rows = reader.page(0, LETTERS_LIMIT)["rows"]
        for row in rows[:CONTENTS_LIMIT]:
            if "group_id" in row:
                found = reader.show(row["group_id"], row["order"], watch.config, 0, SEQUENCES_LIMIT)
                if found is not None:
                    contents[row["group_id"]] = found
    return rows, contents
