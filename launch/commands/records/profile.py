"""`rolloutmq profile`: where the time of a run goes, what to change, and how long each hop of its groups took.

The hops come from the journal. A run without one has those of the latency samples in its record, and so have the rows
by worker, host, engine, GPU and route.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.bus.rundir import read_run
from rolloutmq.launch.commands.records.latency_table import (
    PERCENTS,
    RATE_HEADS,
    durations_of,
    percent_heads,
    rates_of,
    seconds,
    sums_json,
    sums_lines,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable, printable_lines
from rolloutmq.schemas.statistics.histogram import Histogram
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.inspect.history import JournalHistory
from rolloutmq.services.broker.journal.inspect.hops import HopFollower, HopKey, Slowest, merged
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.dashboard.record.damage import damaged_lines
from rolloutmq.services.monitor.profile.advice import Advice, advice
from rolloutmq.services.monitor.profile.latencies import By, LatencyLine, Sum, sum_latencies
from rolloutmq.services.monitor.profile.usage import Usage, UsageLine, part_of_run, read_usage
from rolloutmq.services.monitor.report.history import ran_s
from rolloutmq.services.monitor.status.worker_view import slots_of
from rolloutmq.services.monitor.text import format
from rolloutmq.services.monitor.text.exit_codes import FAILED, complain, reader_may_leave
from rolloutmq.services.monitor.text.jsonl import read_whole_lines

SAMPLE: Final = b'"latency_sample"'
NOTHING: Final = {
    By.ENV: "the broker has no group of one yet",
    By.WORKER: "no worker has ended a rollout or asked a server",
    By.HOST: "no process has published a sample",
    By.ENGINE: "no inference server was asked",
    By.GPU: "no process with GPUs of its own has published a sample",
    By.ROUTE: "no HTTP server of the run was asked",
}
"""Why there may be no row."""
BAR: Final = 24
ENVIRONMENTS_SHOWN: Final = 64
"""Most environments of the table for a person."""
"""Width of a bar, in characters."""


class Profile(NamedTuple):
    """What the records of a run say about its time.

    Attributes:
        usage: Use of time by trainer, rollout slots and inference servers.
        advice: What limits the run.
        recorded: Whether the broker keeps a journal; without one the hops are those of the samples.
        hops: Durations by environment and hop.
        slowest: Slowest group by environment and hop.
        unread: A line for each damaged part of the records, which the figures lack.
        sums: Latency samples by environment and hop.
        ran_s: Seconds that the run has run, its lives together; None if unknown.
    """

    usage: Usage
    advice: list[Advice]
    recorded: bool
    hops: dict[HopKey, Histogram]
    slowest: dict[HopKey, Slowest]
    unread: tuple[str, ...] = ()
    sums: dict[HopKey, Sum] = {}
    ran_s: float | None = None

    @property
    def starved_of_run(self) -> float | None:
        """Part of the whole run in which the trainer was ready and had no batch; None if it is not known."""
        return None if self.usage.is_unrecorded else part_of_run(self.usage.run_starved_s, self.ran_s)

    @property
    def is_sampled(self) -> bool:
        """Whether the hops are those of the samples."""
        return bool(self.hops) and not self.recorded


def profiled(run_dir: Path) -> Profile:
    """Read the profile of a running or ended run. Blocks on the disk.

    Raises:
        RecordVersionError: Another version wrote the journal.
    """
    layout = RunLayout(run_dir)
    require_own_records(layout)
    usage = read_usage(read_whole_lines(layout.metrics, UsageLine, Counter()), slots_of(layout))
    unread = _damage_of(layout)
    config, _ = read_run(run_dir)
    fewest = sum(env.min_workers for env in config.environment.values())
    recorded = config.broker.durability is not Durability.MEMORY
    follower = HopFollower()
    if recorded:
        history = JournalHistory(layout.journal)
        for at, event in history.with_unlogged():
            follower.apply(at, event)
        unread += history.damage
    sums = {
        HopKey(key.label, key.hop, key.split): one
        for key, one in sum_latencies(_samples(layout), By.ENV).rows.items()
    }
    hops, slowest = follower.histograms(), follower.slowest()
    for key, one in sums.items():
        # The journal has no offsets of clocks: between two hosts the samples tell the way of a group.
        if not recorded or (key in hops and one.clock_error_s):
            hops[key], slowest[key] = one.durations, Slowest(one.slowest_s, one.slowest_id)
    return Profile(
        usage, advice(usage, fewest), recorded, hops, slowest, tuple(unread), sums, ran_s(layout, time.time())
    )


def _samples(layout: RunLayout) -> Iterator[LatencyLine]:
    """Yield the latency samples of the record."""
    return read_whole_lines(layout.metrics, LatencyLine, Counter(), SAMPLE)


def latencies(run_dir: Path, by: By, *, as_json: bool) -> int:
    """Print the latencies of a run by workers, hosts or another part; return the exit code.

    FAILED if no sample of them was recorded.
    """
    layout = RunLayout(run_dir)
    sums = sum_latencies(_samples(layout), by)
    unread = [f"not read: {what}" for what in _damage_of(layout)]
    if not sums.rows:
        nothing = f"{run_dir}: no latency by {by} was recorded: {NOTHING[by]}"
        return complain("\n".join((nothing, *unread)), FAILED)
    if as_json:
        told = sums_json(sums, by) | {"not_read": [line.removeprefix("not read: ") for line in unread]}
        text = msgspec.json.format(msgspec.json.encode(told), indent=2).decode()
    else:
        text = "\n".join(map(printable, (*sums_lines(sums, by), *unread)))
    with reader_may_leave():
        sys.stdout.write(printable_lines(text) + "\n")
    return 0


def _damage_of(layout: RunLayout) -> list[str]:
    """Return a line about the damaged lines of the record, if there are any: the page counts the same."""
    count = damaged_lines(layout.metrics)
    return [f"{count:,} line{'s' * (count != 1)} of {layout.metrics.name}, damaged"] if count else []


def profile(run_dir: Path, *, as_json: bool) -> int:
    """Print the profile of a run; return the exit code. FAILED if nothing of it was recorded."""
    found = profiled(run_dir)
    if found.usage.is_unrecorded and not found.hops:
        nothing = f"{run_dir}: nothing was recorded yet: no event and no group"
        return complain("\n".join((nothing, *_unread(found))), FAILED)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(profile_json(found)), indent=2).decode()
    else:
        text = "\n".join(map(printable, profile_lines(found)))
    with reader_may_leave():
        sys.stdout.write(printable_lines(text) + "\n")
    return 0


def profile_json(found: Profile) -> dict[str, Any]:
    """Return the profile as plain data; all times in seconds."""
    usage = found.usage
    return {
        "advice": [one._asdict() for one in found.advice],
        "is_unrecorded": usage.is_unrecorded,
        "has_settled": usage.has_settled,
        "start_s": None if _lacks_start(usage) else usage.start_s,
        "trainer_s": usage.trainer_s,
        "starved_s": usage.starved_s,
        "starved": usage.starved if usage.trainer_s else None,
        "starved_of_run": found.starved_of_run,
        "blocked": usage.blocked if usage.slot_s else None,
        "trainer_waits_s": dict(usage.trainer_waits_s),
        "workerless_s": usage.workerless_s,
        "slot_s": dict(usage.slot_s),
        "unknown_slots_s": usage.unknown_slots_s,
        "blocked_s": dict(usage.blocked_s),
        "producer_waits_s": dict(usage.producer_waits_s),
        "inference_busy": usage.busy,
        "inference_bound": sorted(usage.inference_bound),
        "recorded": found.recorded,
        "sampled": found.is_sampled,
        "hops": [
            {
                "env": key.env,
                "split": key.split.name.lower(),
                "hop": key.hop.value,
                "groups": one.count,
                "mean_s": one.mean_s,
                **{
                    f"p{percent:g}_s": one.percentile_s(percent, found.slowest[key].seconds)
                    for percent in PERCENTS
                },
                "slowest_s": found.slowest[key].seconds,
                "slowest": found.slowest[key].group_id,
                "clock_error_s": _clock_error_s(found, key),
                "groups_per_s": found.sums[key].per_s if key in found.sums else None,
                "tokens_per_s": found.sums[key].tokens_per_s if key in found.sums else None,
            }
            for key, one in found.hops.items()
        ],
        "not_read": list(found.unread),
    }


def profile_lines(found: Profile) -> Iterator[str]:
    """Yield the profile as lines for a person."""
    usage = found.usage
    yield f"where the time goes: {_time(usage)}"
    if (of_run := found.starved_of_run) is not None:
        later = f", {usage.starved:.0%} from the first batch" if usage.trainer_s else ""
        yield f"  trainer starved: {of_run:.0%} of the whole run{later}"
    if usage.slot_s:
        yield f"  workers blocked: {usage.blocked:.0%} of the time of their rollout slots from the first batch"
    for one in found.advice:
        yield f"  {one.where}"
        yield f"    -> {one.change}"
    if usage.unknown_slots_s:
        unknown = seconds(usage.unknown_slots_s)
        yield f"  the rollout slots of {unknown} are not known: the record names no single worker then"
    yield ""
    if found.recorded or found.is_sampled:
        yield from _waterfall(merged(found.hops))
        yield from _table(found)
    else:
        yield "no hops: at durability `memory` the broker keeps no journal, and no latency sample was recorded"
    yield from _unread(found)


def _time(usage: Usage) -> str:
    if usage.is_unrecorded:
        return "not recorded"
    if not usage.has_settled:
        return f"{seconds(usage.start_s)} without a settled batch"
    if _lacks_start(usage):
        return f"{seconds(usage.trainer_s)} from the first recorded batch on; the record lacks the start of the run"
    return f"{seconds(usage.start_s)} to the first settled batch, then {seconds(usage.trainer_s)}"


def _lacks_start(usage: Usage) -> bool:
    """Return whether batches were settled before the record began: telemetry came later, or its file was cut."""
    return usage.has_settled and not usage.start_s


def _unread(found: Profile) -> Iterator[str]:
    yield from (f"not read: {what}" for what in found.unread)


def _waterfall(hops: dict[Hop, Histogram]) -> Iterator[str]:
    """Yield the mean way of a group, each hop where the one before ends. The checkpoint comes later, beside others."""
    way = {hop: one.mean_s for hop, one in hops.items() if hop is not Hop.COMMIT}
    whole = sum(way.values())
    if not whole:
        return
    yield f"the mean way of a group to the end of its step, {seconds(whole)}"
    before = 0.0
    for hop, mean_s in way.items():
        indent = round(before / whole * BAR)
        width = max(1, round((before + mean_s) / whole * BAR) - indent)
        shown = " " * min(indent, BAR - 1) + format.bar(1.0, width)
        yield f"  {hop.value:<8} {shown:<{BAR + 1}} {seconds(mean_s):>8} {mean_s / whole:>5.0%}"
        before += mean_s
    yield ""


def _table(found: Profile) -> Iterator[str]:
    environments = _shown_environments(found)
    shown = {key: one for key, one in found.hops.items() if key.env in environments}
    width = max([len("environment"), *map(len, map(_row, shown))])
    heads = percent_heads() + (RATE_HEADS if found.is_sampled else "")
    yield f"{'environment':<{width}}  {'hop':<8}{'groups':>9}{'mean':>9}{heads}  slowest group"
    for key, one in shown.items():
        slowest = found.slowest[key]
        rates = rates_of(found.sums[key]) if found.is_sampled else ""
        times = durations_of(one, _clock_error_s(found, key), slowest.seconds) + rates
        row = f"{_row(key):<{width}}  {key.hop.value:<8}{one.count:>9,}{times}"
        yield f"{row}  {seconds(slowest.seconds)} {slowest.group_id}"
    if more := len({key.env for key in found.hops}) - len({key.env for key in shown}):
        yield f"{more:,} more environments with less time; `--json` has all"


def _shown_environments(found: Profile) -> Set[str]:
    """Return the environments with the most time of groups on their way."""
    total_s: defaultdict[str, float] = defaultdict(float)
    for key, one in found.hops.items():
        total_s[key.env] += one.total_s
    return {*sorted(total_s, key=total_s.__getitem__, reverse=True)[:ENVIRONMENTS_SHOWN]}


def _clock_error_s(found: Profile, key: HopKey) -> float:
    """Return the bound of the error between the clocks of a hop, if that is known."""
    return found.sums[key].clock_error_s if key in found.sums else 0.0


def _row(key: HopKey) -> str:
    return f"{key.env} (eval)" if key.split is Split.EVAL else key.env
