"""The lives of a run, recorded in `lives.json` by its launcher, or by a broker that was started by hand.

A process that is killed cannot record its end. Its life then lasted until the run last wrote of itself: of the events
and of the groups, in files that only grow while a broker answers.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rolloutmq.bus.rundir import read_json, read_lives, write_json
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.services.process.identity import alive

logger = logging.getLogger(__name__)


@contextmanager
def living(layout: RunLayout) -> Iterator[None]:
    """Record a life of the run: the block, in a directory that this process has claimed.

    An end that cannot be written, as on a full disk, is logged: readers then take it for that of a killed process.

    Raises:
        OSError: The start cannot be written.
    """
    before = ended_lives(layout)
    life = Life(time.time())
    write_json(layout.lives, [*before, life])
    try:
        yield
    finally:
        try:
            write_json(layout.lives, [*before, Life(life.began, time.time())])
        except OSError as error:
            logger.warning("end of the run not recorded path=%s error=%s", layout.lives, error)


def has_launcher(layout: RunLayout) -> bool:
    """Return whether a running launcher owns the run, and so records its lives."""
    try:
        launcher = read_json(layout.owner, ProcessIdentity)
    except msgspec.DecodeError:
        return False
    return launcher is not None and alive(launcher)


def ended_lives(layout: RunLayout) -> list[Life]:
    """Return the lives of a run without a living process. One that was killed lasted until it last wrote of itself."""
    lives = read_lives(layout)
    if all(life.ended is not None for life in lives):
        return list(lives)
    written = last_written(layout)
    return [life if life.ended is not None else Life(life.began, max(life.began, written)) for life in lives]


def last_written(layout: RunLayout) -> float:
    """Return when a broker of the run last showed life, in seconds of the wall clock; 0 if it never did.

    The journal does not count: `up` and `down` cut its torn end afterwards.
    """
    logs = (layout.metrics, layout.trained, layout.settled, layout.dropped)
    return max(_changes((*logs, *layout.acks.glob("*.jsonl"))), default=0.0)


def _changes(paths: Iterable[Path]) -> Iterator[float]:
    """Yield when each file changed; an empty one is only opened, which shows nothing."""
    for path in paths:
        with suppress(OSError):
            found = path.stat()
            if found.st_size:
                yield found.st_mtime
