"""Checkpoints of another project's trainer: they count its lives, and the broker forgets the groups that they cover.

A commit is a promise: the broker may delete the groups at once. So a checkpoint is synced to disk before it is
committed. The broker may be away then: a commit that does not arrive in time is left to the next checkpoint.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from rolloutmq.bus.files import force, force_tree
from rolloutmq.bus.transport.endpoint import Where, is_address
from rolloutmq.schemas.errors import UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.checkpoint import next_incarnation

logger = logging.getLogger(__name__)

COMMIT_S: Final = 60.0
"""Longest wait of a commit; the next one covers it."""


def lives_of(where: Where, checkpoints: str, key: str = "checkpoints") -> Path:
    """Return the folder with the counter of a trainer's incarnations.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        checkpoints: The trainer's folder of checkpoints. The counter is there if the run is not on this machine.
        key: Name of this setting.

    Raises:
        UsageError: The counter would have to be in a cloud storage.
    """
    if not is_address(where):
        return RunLayout(Path(str(where))).checkpoints
    if "://" in checkpoints:
        raise UsageError(
            f"{key}: must be a local folder if the bus is joined by an address (got {checkpoints}), because the "
            "lives of the trainer are counted there; name the run directory, or a folder that all lives see"
        )
    return Path(checkpoints)


def next_life(where: Where, checkpoints: str, key: str = "checkpoints") -> int:
    """Reserve the next incarnation of a trainer, from 0, and return it once it is on disk. See `lives_of`."""
    return next_incarnation(lives_of(where, checkpoints, key))


def make_durable(folder: str | Path, trackers: Iterable[str] = ()) -> None:
    """Sync a checkpoint to disk. Blocks. Does nothing for one in a cloud storage, which is durable by itself.

    Args:
        folder: Folder of the checkpoint.
        trackers: Files beside it that name the newest checkpoint.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    for name in trackers:
        if (folder.parent / name).is_file():
            force(folder.parent / name)
    force_tree(folder)


def commit(send: Callable[..., object], version: PolicyVersion) -> None:
    """Report a durable checkpoint. Blocks for at most `COMMIT_S`.

    Args:
        send: `commit` of a blocking consumer.
        version: Policy of the checkpoint.
    """
    try:
        send(version, timeout_s=COMMIT_S)
    except WaitTimeoutError as error:
        logger.warning("checkpoint not reported version=%s error=%s", version, error)
