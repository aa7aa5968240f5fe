"""Delivery of spool files whose producers do not start again.

A producer that opens under its old name sends its saved groups. A name that is not used again, because the run scaled
down or ended, leaves its file behind: `resend_spools` sends it.
"""

import logging
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

from rolloutmq.bus.producer import spool_file
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.schemas.errors import MalformedError, RecordVersionError
from rolloutmq.schemas.wire.requests import RegisterProducer

logger = logging.getLogger(__name__)

_DESCRIBED: Final = (
    "producer", "run", "env", "split", "group_size", "slots", "weight", "min_share", "max_tokens",
)  # fmt: skip


async def resend_spools(
    where: Where, directory: Path, *, ack_logs: Path | None = None, living: Container[str] = ()
) -> dict[str, int]:
    """Send every spool file of a directory under its producer's name and session, then remove it.

    Waits for the broker and its credit without a limit. Cancelled: unacked groups are still in their files. Damaged
    files are renamed; files of another version stay unchanged.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        directory: Directory of the files; a run has them in `spools/`.
        ack_logs: Directory of the files `<producer>.jsonl`, which get one line for each acked group.
        living: Live producers, which send their own files. A live producer that is not listed would be fenced.

    Returns:
        Number of acked groups by producer.

    Raises:
        RefusedError: The broker does not accept a producer.
        RecordVersionError: Another version wrote one of the files; all others were sent.
    """
    acked: dict[str, int] = {}
    unread: list[RecordVersionError] = []
    for path, about in list(_left_in(directory, living, unread)):
        groups = await _resend(where, path, about, ack_logs)
        acked[about.producer] = acked.get(about.producer, 0) + groups
    if unread:
        raise unread[0]
    return acked


async def resend_set_aside(
    where: Where, save_to: Path, producer: str, *, ack_logs: Path | None = None
) -> int:
    """Send the groups that fenced processes of a producer set aside beside `save_to`; return how many were acked.

    Call it before the producer opens: it fences the session in use, as opening does. Waits for the broker and credit
    without a limit. Cancelled: unacked groups are still in their files.

    Raises:
        RefusedError: The broker does not accept the producer.
        RecordVersionError: Another version wrote one of the files; all others were sent.
    """
    unread: list[RecordVersionError] = []
    aside = [
        (path, about)
        for path, about in _left_in(save_to.parent, (), unread)
        if about.producer == producer and path.name.startswith(f"{save_to.name}{spool_file.SET_ASIDE}")
    ]
    acked = 0
    for path, about in aside:
        acked += await _resend(where, path, about, ack_logs)
    if unread:
        raise unread[0]
    return acked


async def _resend(where: Where, path: Path, about: RegisterProducer, ack_logs: Path | None) -> int:
    """Send the groups of one file in their session; return how many were acked."""
    log = ack_logs and ack_logs / f"{about.producer}.jsonl"
    options = {name: getattr(about, name) for name in _DESCRIBED}
    async with Producer.open(where, save_to=path, ack_log=log, **options) as producer:
        producer.start_draining()
    logger.info("resent producer=%s groups=%d file=%s", about.producer, producer.accepted, path)
    return producer.accepted


def _left_in(
    directory: Path, living: Container[str], unread: list[RecordVersionError]
) -> Iterator[tuple[Path, RegisterProducer]]:
    """Yield each spool file that no live producer sends; collect the errors of other versions in `unread`."""
    for path in spool_file.spool_files(directory):
        if path.name in living:
            continue
        try:
            about = spool_file.owner(path)
        except MalformedError as error:
            spool_file.keep_aside(path, error)
        except RecordVersionError as error:
            unread.append(error)
        else:
            if about.producer not in living:
                yield path, about
