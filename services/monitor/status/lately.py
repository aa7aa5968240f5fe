"""What training showed last: step, figures of learning, and findings that last.

It is at the end of `metrics.jsonl`, among many lines of other kinds. The end is searched backwards for the kinds that
are shown, and only those lines are decoded: `status` may be called every second. With a hundred environments a line of
the broker's state has some 50 kB: where steps take minutes, the last ones are far before the end. The search goes on to
them in blocks, up to a limit.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from rolloutmq.bus.files import open_regular
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.monitor.report.history import HEAD_BYTES, MOMENTARY, Recalled, decoded
from rolloutmq.services.monitor.text import figures

END_BYTES: Final = 8 << 20
"""End of the metrics that is searched: a lasting finding is told again and again."""
BLOCK_BYTES: Final = 2 << 20
SEARCHED_BYTES: Final = 64 << 20
"""Metrics before the end that are searched for the last steps."""
STEPS: Final = 10
"""Events of training that are enough before the end."""
RECENT: Final = 64
"""Last events of training whose figures are shown: a trainer may log some of them less often than others."""
FINDINGS: Final = (b'"kind":"health_finding"',)
TRAINING: Final = (b'"kind":"step_done"', b'"kind":"batch_settled"', b'"kind":"step_figures"')


class Lately(NamedTuple):
    """What training showed last.

    Attributes:
        step: Last step, as the trainer reported it, or else as the broker did; None before the first.
        figures: Last value of each figure of learning, of the last `RECENT` events.
        not_finite: Figures that were not finite when the trainer last logged some.
        findings: Lasting findings about rewards and trainer that have not ended.
    """

    step: StepDone | BatchSettled | None = None
    figures: Mapping[str, float] = MappingProxyType({})
    not_finite: tuple[str, ...] = ()
    findings: tuple[HealthFinding, ...] = ()


def read_lately(layout: RunLayout) -> Lately:
    """Read what training showed last from the end of the metrics. Blocks on the disk."""
    end = _end(layout.metrics)
    step, told = _told(chain([end], blocks_before(layout.metrics, len(end))))
    shown: dict[str, float] = {}
    not_finite: tuple[str, ...] = ()
    for event in told:
        if isinstance(event, StepDone):
            shown |= figures.of_step(event.loss, event.extra)
        else:
            shown |= event.figures
            not_finite = event.not_finite
    return Lately(step, shown, not_finite, _lasting(end))


def _told(blocks: Iterable[bytes]) -> tuple[StepDone | BatchSettled | None, Sequence[StepDone | StepFigures]]:
    """Return the last step, and the last events with figures in their order. The last block comes first."""
    step: StepDone | BatchSettled | None = None
    told: list[StepDone | StepFigures] = []
    number = 0
    for block in blocks:
        for event in _newest_first(block, TRAINING):
            number += 1
            if isinstance(event, StepDone | StepFigures) and number <= RECENT:
                told.append(event)
            if step is None and (
                isinstance(event, StepDone) or (isinstance(event, BatchSettled) and event.stepped)
            ):
                step = event
            if step is not None and number >= RECENT:
                return step, told[::-1]
        if step is not None and number >= STEPS:
            break
    return step, told[::-1]


def _lasting(end: bytes) -> tuple[HealthFinding, ...]:
    """Return the lasting findings that have not ended, in the order in which they were told last."""
    latest: dict[tuple[str, str], HealthFinding] = {}
    for event in _newest_first(end, FINDINGS):
        if isinstance(event, HealthFinding):
            latest.setdefault((event.env, event.finding), event)
    found = (one for one in latest.values() if not one.ended and one.finding not in MOMENTARY)
    return tuple(found)[::-1]


def _end(path: Path) -> bytes:
    """Return the end of a file from the beginning of a line; nothing if there is no such file."""
    try:
        record = open_regular(path)
    except FileNotFoundError:
        return b""
    with record:
        if (size := record.seek(0, os.SEEK_END)) > END_BYTES:
            record.seek(size - END_BYTES)
            record.readline()  # the rest of a cut line
        else:
            record.seek(0)
        return record.read(END_BYTES)


def blocks_before(path: Path, known: int) -> Iterator[bytes]:
    """Yield blocks of whole lines from the `known` end of a file backwards, up to the limit."""
    try:
        with open_regular(path) as file:
            stop = max(0, file.seek(0, os.SEEK_END) - known)
            least = max(0, stop - SEARCHED_BYTES)
            while stop > least:
                start = max(least, stop - BLOCK_BYTES)
                file.seek(start)
                block = file.read(stop - start)
                cut = block.find(b"\n") + 1 if start else 0
                if start and cut in {0, len(block)}:  # a line longer than a block
                    return
                yield block[cut:]
                stop = start + cut
    except OSError:
        return


def _newest_first(end: bytes, kinds: Sequence[bytes]) -> Iterator[Recalled]:
    """Yield the events of some kinds, the last one first; lines that do not decode are passed over."""
    places = {kind: end.rfind(kind) for kind in kinds}
    while (at := max(places.values())) >= 0:
        begin, after = end.rfind(b"\n", 0, at) + 1, end.find(b"\n", at)
        if (
            at - begin < HEAD_BYTES
            and (found := decoded(end[begin : after if after >= 0 else None])) is not None
        ):
            yield found.event
        places |= {kind: end.rfind(kind, 0, begin) for kind in kinds if places[kind] >= begin}
