"""What a run leaves when it has ended: `summary.json`, `report.png`, and a few lines for the person who waited."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolloutmq.launch.bias import Survey, survey, unread
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.broker.journal.remaining import remaining_ids
from rolloutmq.services.broker.saved import load
from rolloutmq.services.monitor.bias_table import table, verdict_line
from rolloutmq.services.monitor.report import bound_text, write_report
from rolloutmq.services.monitor.summary import summarise

logger = logging.getLogger(__name__)


def conclude(config: RunConfig, layout: RunLayout, reason: str, wall_s: float | None) -> None:
    """Write the summary and the picture of a run that has ended, and print what it came to.

    Args:
        config: Of the run.
        layout: Of the run.
        reason: Why it ended.
        wall_s: Seconds from the start of the command to the end of its last process; None if nobody knows.
    """
    if config.gateway.enabled and not config.trainer.enabled:
        _conclude_gateway(layout, reason, wall_s)
        return
    saved = _saved_ids(layout)
    found = survey(layout, saved)
    summary, picture = _write(config, layout, reason, wall_s, saved, found)
    lines = _lines(layout, summary, picture, config.trainer.steps, found)
    sys.stdout.write("\n".join(lines) + "\n")


def _conclude_gateway(layout: RunLayout, reason: str, wall_s: float | None) -> None:
    """Say how to go on: the trainer is somebody else's, and only it knows what was learned."""
    layout.summary.write_text(json.dumps({"ended": reason, "wall_s": wall_s}, indent=2) + "\n")
    sys.stdout.write(
        f"ended      {reason}\n"
        f"what was not handed out is kept: go on with `rolloutmq gateway --run-dir {layout.root}`\n"
        f"`rolloutmq ledger verify {layout.root}` tells where every group is\n"
    )


def retell(config: RunConfig, layout: RunLayout, *, as_json: bool) -> None:
    """Write summary and picture again, and print what it came to, with produced against trained in full.

    Raises:
        DamagedFileError: A log is damaged. The comparison, which says so too, is printed nevertheless.
    """
    saved = _saved_ids(layout)
    found = survey(layout, saved)
    summary: dict[str, Any] | None = None
    lines: list[str] = []
    try:
        summary, picture = _write(config, layout, "see up.log", None, saved, found)
        lines = [*_lines(layout, summary, picture, config.trainer.steps, found), ""]
    finally:
        if as_json:
            text = json.dumps({"summary": summary, "bias": found.fields()}, indent=2)
        else:
            text = "\n".join([*lines, "produced against trained", *table(found.bias), *unread(found)])
        sys.stdout.write(text + "\n")


def _write(
    config: RunConfig,
    layout: RunLayout,
    reason: str,
    wall_s: float | None,
    saved: list[str],
    found: Survey,
) -> tuple[dict[str, Any], Path | None]:
    summary = summarise(layout, config, saved_ids=lambda _: saved, wall_s=wall_s)
    summary = {**summary, "bias": found.bias.short(), "ended": reason, "seed": config.run.seed}
    layout.summary.write_text(json.dumps(summary, indent=2) + "\n")
    return summary, _picture(config, layout, summary)


def _saved_ids(layout: RunLayout) -> list[str]:
    return remaining_ids(layout.journal) if layout.journal.is_dir() else load(layout.saved).ids


def _picture(config: RunConfig, layout: RunLayout, summary: dict[str, Any]) -> Path | None:
    try:
        write_report(layout, config, summary)
    except MissingError as error:
        logger.warning("no picture reason=%s", error)
        return None
    return layout.report


def _lines(
    layout: RunLayout, summary: dict[str, Any], picture: Path | None, total: int, found: Survey
) -> Iterator[str]:
    yield f"ended      {summary['ended']}, after {summary['wall_s']:.1f} s"
    if summary["reward_first"] is not None:
        yield f"reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} in {summary['steps']} steps"
    yield from _groups(layout, summary)
    yield f"staleness  {summary['staleness_max']} at most, the bound is {bound_text(summary)}"
    yield f"bias       {verdict_line(found.bias)}"
    yield f"workers    {summary['workers_min']} to {summary['workers_max']}"
    yield f"summary    {layout.summary}"
    if picture is not None:
        yield f"picture    {picture}"
    if summary["steps"] < total:
        yield f"go on with `rolloutmq up CONFIG --run-dir {layout.root} --resume`"


def _groups(layout: RunLayout, summary: dict[str, Any]) -> Iterator[str]:
    rest = (
        f"{summary['groups_expired']} expired, {summary['groups_dead']} dead, "
        f"{summary['groups_in_flight']} in flight"
    )
    if summary.get("groups_settled") is not None:
        yield f"groups     {summary['groups_accepted']} accepted: {summary['groups_settled']} to your trainer, {rest}"
        yield f"           `rolloutmq ledger verify {layout.root}` tells what became of them"
        return
    yield (
        f"groups     {summary['groups_accepted']} accepted: {summary['groups_trained']} trained, "
        f"{summary['groups_filtered']} filtered, {rest}"
    )
    yield f"           {summary['groups_lost']} lost, {summary['groups_trained_twice']} trained twice"
