"""`rolloutmq ratings`: agreement and disagreement of raters, recomputed from the groups on disk.

The column `ratings` of each group has what every rater gave; so the command needs neither the raters nor the running
environment. Groups of an evaluation are left out and counted, as the workers keep them out of their window. The journal
keeps a group until a checkpoint covers it, or for good with `up --replay`.

Time and memory are bounded, however large the journal is: the groups last on disk count, up to `RATINGS_LIMIT` ratings
of an environment, and up to `RATIO_LIMIT` with the metric `ratio`, which compares all pairs. The others are counted.
"""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.encoding.codec import decode_group
from rolloutmq.bus.rundir import read_run
from rolloutmq.launch.commands.records.ledger import recorded
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import RATERS, RATINGS, Group
from rolloutmq.schemas.printable import printable, printable_lines
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.journal.inspect.history import stored
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.monitor.text.exit_codes import FAILED, complain, reader_may_leave
from rolloutmq.services.rewards.agreement import Metric, alpha, alphas_without, disagreement
from rolloutmq.services.rewards.combine import Scale, scaled

SHOWN: Final = 5
"""Groups shown, those with the largest disagreement."""
RATINGS_LIMIT: Final = 1 << 22
"""Most ratings of an environment in a computation: 32 MiB."""
RATIO_LIMIT: Final = 1 << 14
"""The same with the metric `ratio`: alpha takes about a second."""

Floats = NDArray[np.float64]


@dataclass(slots=True)
class RatedGroups:
    """Ratings of the last groups of training with the same raters, at most `RATINGS_LIMIT`.

    Attributes:
        env: Environment.
        raters: Names of the raters.
        groups: Id and ratings `[sequences][raters]` of each group.
        sequences: Sequences of these groups.
        left_out: Sequences of earlier groups.
        evaluation_groups: Groups of an evaluation, which are left out.
    """

    env: str
    raters: tuple[str, ...]
    groups: deque[tuple[str, Floats]] = field(default_factory=deque)
    sequences: int = 0
    left_out: int = 0
    evaluation_groups: int = 0

    def add(self, group: Group, split: Split) -> None:
        """Add the ratings of a group, or count it if it is of an evaluation."""
        if split is not Split.TRAIN:
            self.evaluation_groups += 1
            return
        self.groups.append((group.group_id, np.stack(group[RATINGS]).astype(np.float64)))
        self.sequences += group.sequences
        self.keep(RATINGS_LIMIT)

    def keep(self, ratings: int) -> None:
        """Leave out the earliest groups beyond a number of ratings; the last group always stays."""
        while len(self.groups) > 1 and self.sequences * len(self.raters) > ratings:
            _, table = self.groups.popleft()
            self.sequences -= len(table)
            self.left_out += len(table)


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement of the raters of an environment. A value that is undefined is None."""

    env: str
    raters: tuple[str, ...]
    metric: str
    scale: str
    sequences: int
    evaluation_groups: int
    """Groups of an evaluation that were left out."""
    left_out: int
    """Earlier sequences that were left out, since time and memory are bounded."""
    alpha: float | None
    problem: str
    missing: dict[str, int]
    alpha_without: dict[str, float | None]
    most_disputed: dict[str, float]
    """Mean disagreement of the sequences of a group by its id; 1 is that of chance."""


def ratings(run_dir: Path, env: str | None, metric: str | None, *, as_json: bool) -> int:
    """Print the agreement of the raters of a running or ended run; return the exit code.

    Raises:
        ConfigError: There is no such metric.
    """
    if metric is not None and metric not in get_args(Metric):
        raise ConfigError("--metric", f"must be one of {', '.join(get_args(Metric))} (got {metric!r})")
    layout = RunLayout(run_dir)
    require_own_records(layout)
    if not recorded(layout):
        return complain("at durability `memory` the broker keeps no groups on disk", FAILED)
    config, _ = read_run(run_dir)
    known = [one for one in rated(layout) if env in {None, one.env}]
    found = [agreement(one, config, metric) for one in known if one.groups]
    if not found:
        evaluated = sum(one.evaluation_groups for one in known)
        rest = f" ({evaluated} groups of evaluations were left out)" if evaluated else ""
        return complain(f"no group of training on disk in {layout.journal} has ratings{rest}", FAILED)
    with reader_may_leave():
        if as_json:
            text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
        else:
            text = "\n".join(map(printable, (line for one in found for line in _lines(one))))
        sys.stdout.write(printable_lines(text) + "\n")
    return 0


def rated(layout: RunLayout) -> list[RatedGroups]:
    """Return the ratings of the last groups on disk, by environment and raters. Blocks on the disk."""
    found: dict[tuple[str, tuple[str, ...]], RatedGroups] = {}
    for meta, frames in stored(layout.journal):
        if all(column.name != RATINGS for column in meta.table.columns):
            continue
        try:
            group = decode_group(meta.header, meta.table, frames, meta.env)
        except WireError:
            continue
        names = _names(group)
        if names:
            found.setdefault((meta.env, names), RatedGroups(meta.env, names)).add(group, meta.split)
    return list(found.values())


def _names(group: Group) -> tuple[str, ...]:
    """Return the names of the raters; empty if the columns are no table of ratings of ours."""
    rows = group.columns[RATERS].values if RATERS in group else None
    column = group.columns[RATINGS]
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict) or column.depth != 1:
        return ()
    fits = bool((column.lengths[0] == len(rows[0])).all())
    return tuple(map(str, rows[0])) if fits else ()


def agreement(groups: RatedGroups, config: RunConfig, metric: str | None) -> Agreement:
    """Return the agreement over the groups, on the configured scale; `ratio` leaves out more of them."""
    section = config.environment.get(groups.env)
    rewards = section.rewards if section else None
    chosen: Any = metric or (rewards.agreement.metric if rewards else "interval")
    scale: Scale = rewards.scale if rewards else "none"
    if chosen == "ratio":
        groups.keep(RATIO_LIMIT)
    given = np.concatenate([ratings for _, ratings in groups.groups])
    table = scaled(given, given, scale)
    found = alpha(table, chosen)
    without = alphas_without(table, chosen)
    return Agreement(
        env=groups.env,
        raters=groups.raters,
        metric=chosen,
        scale=scale,
        sequences=len(table),
        evaluation_groups=groups.evaluation_groups,
        left_out=groups.left_out,
        alpha=_number(found.value),
        problem=found.problem,
        missing=dict(zip(groups.raters, np.isnan(given).sum(axis=0).tolist(), strict=True)),
        alpha_without=dict(zip(groups.raters, map(_number, without.tolist()), strict=True)),
        most_disputed=_disputed(groups, disagreement(table, chosen)),
    )


def _disputed(groups: RatedGroups, disagreed: Any) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    names = (name for name, ratings in groups.groups for _ in ratings)
    for name, value in zip(names, disagreed.tolist(), strict=True):
        if isfinite(value):
            sums.setdefault(name, []).append(value)
    means = {name: sum(values) / len(values) for name, values in sums.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1])[:SHOWN])


def _number(value: float) -> float | None:
    return value if isfinite(value) else None


def _lines(found: Agreement) -> Iterator[str]:
    value = f"undefined: {found.problem}" if found.alpha is None else f"{found.alpha:.4f}"
    yield f"{found.env}: alpha {value} ({found.metric}, scale {found.scale}, {found.sequences} sequences)"
    if found.evaluation_groups:
        yield f"  {found.evaluation_groups} groups of evaluations left out"
    if found.left_out:
        yield f"  {found.left_out} earlier sequences left out: the computation is bounded"
    for name in found.raters:
        without = found.alpha_without[name]
        rest = "undefined" if without is None else f"{without:.4f}"
        yield f"  {name:<16} {found.missing[name]} missing; alpha without it {rest}"
    yield from (f"  disputed         {name} {value:.3f}" for name, value in found.most_disputed.items())
