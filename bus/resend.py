"""Bringing home what producers left behind whose names will have no next life.

A producer that opens under its old name sends its saved groups by itself. A name that is never used again, because
fewer workers are wanted or the run is over, leaves its file where it is: `resend_spools` stands in for it.
"""

import logging
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

from rolloutmq.bus import saved
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.producer import Producer
from rolloutmq.schemas.delivery import RegisterProducer
from rolloutmq.schemas.errors import MalformedError

logger = logging.getLogger(__name__)

_DESCRIBED: Final = (
    "producer", "run", "env", "split", "group_size", "slots", "weight", "min_share", "max_tokens",
)  # fmt: skip


async def resend_spools(
    where: Where, directory: Path, *, ack_logs: Path | None = None, living: Container[str] = ()
) -> dict[str, int]:
    """Send every saved spool of a directory, each under its producer's name and session, and remove it.

    Waits for the broker, and for its credit, as long as it takes. Cancelled: what was not acked is still in its file.
    Damaged files are kept aside.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        directory: Where the files are; those of a run are in `spools/`.
        ack_logs: Directory of the files `<producer>.jsonl` that get a line for each acked group.
        living: Producers that send their own; a producer that lives and is not named would be fenced.

    Returns:
        Groups that were acked, by producer.

    Raises:
        RefusedError: The broker does not take a producer.
    """
    acked: dict[str, int] = {}
    for path, about in list(_left_in(directory)):
        if about.producer in living:
            continue
        log = ack_logs and ack_logs / f"{about.producer}.jsonl"
        options = {name: getattr(about, name) for name in _DESCRIBED}
        async with Producer.open(where, save_to=path, ack_log=log, **options) as producer:
            producer.start_draining()
        acked[about.producer] = acked.get(about.producer, 0) + producer.accepted
        logger.info("resent producer=%s groups=%d file=%s", about.producer, producer.accepted, path)
    return acked


def _left_in(directory: Path) -> Iterator[tuple[Path, RegisterProducer]]:
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if path.name.endswith(saved.TEMPORARY) or saved.DAMAGED in path.name:
            continue
        try:
            yield path, saved.owner(path)
        except MalformedError as error:
            saved.keep_aside(path, error)
