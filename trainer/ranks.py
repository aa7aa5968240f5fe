"""Ranks of one trainer: processes that take each step together, each on its own shard of the batch.

Rank 0 owns the shared weights, the log and the checkpoints. All ranks hold a shard of the parameters and the optimizer
(`sharding`), pull under one lease, which gives them disjoint groups, and settle separately. All ranks take every
decision together, at the same place of the loop, or one would wait forever for the others: whether there is a batch,
whether there is a signal, whether to stop.

They meet at a store that rank 0 opens on this host; its address lies in the run directory. Store and ranks listen on
loopback alone: neither asks a peer who it is. If a rank dies, the next
collective call of the others fails and they end too; all are restarted and continue from the checkpoint. A rank that is
back before rank 0 has noticed finds a meeting that has begun without it, and waits for the next one. A hanging rank is
detected after `trainer.rank_patience_s`, which bounds every wait for another rank; the supervisor then ends it.
"""

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.errors import ConfigError, EndOfReplayError, GivenUpError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.process import StoppedError

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
B = TypeVar("B")

HOST: Final = "127.0.0.1"
LOOPBACK: Final = "lo"
"""Interface of the sockets between the ranks."""
LOOK_S: Final = 0.05
JOIN_S: Final = 5.0
"""Time limit of one attempt to reach the store, in seconds."""
_BEGUN: Final = "begun"
"""Key that rank 0 sets once all ranks have met."""


class RankLostError(GivenUpError):
    """The ranks lost contact: all of them restart."""

    def __str__(self) -> str:
        return "another rank of the trainer has ended; see its log"


class RankSilentError(RankLostError):
    """Another rank did not respond within the configured time, and has not ended."""

    def __init__(self, patience_s: float, ranks: Sequence[int] = ()) -> None:
        self.patience_s = patience_s
        self.ranks = ranks
        """The silent ranks, if known."""

    def __str__(self) -> str:
        who = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "another rank"
        return (
            f"{who} of the trainer did not respond within {self.patience_s:g} s (trainer.rank_patience_s): "
            "it hangs, or needs a longer limit"
        )


class Ranks:
    """A single rank."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank owns weights, log and checkpoints."""
        return self.rank == 0

    def sums(self, *values: int) -> list[int]:
        """Return the sums of numbers over all ranks."""
        return list(values)

    def most(self, value: int) -> int:
        """Return the maximum of a number over all ranks."""
        return value

    def every(self, own: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        return [own]


class ManyRanks(Ranks):
    """One of several ranks. Every method waits for the other ranks, which must call the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sums(self, *values: int) -> list[int]:
        """Return the sums of numbers over all ranks."""
        total = torch.tensor(values)
        dist.all_reduce(total)
        return [int(value) for value in total]

    def most(self, value: int) -> int:
        """Return the maximum of a number over all ranks."""
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def every(self, own: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        data = msgspec.msgpack.encode(own)
        size = self.most(len(data))
        padded = torch.zeros(size + 8, dtype=torch.uint8)
        padded[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        padded[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return [msgspec.msgpack.decode(_unpadded(one), type=type(own)) for one in gathered]


def _unpadded(padded: torch.Tensor) -> bytes:
    raw = padded.numpy().tobytes()
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


class _Outcome(IntEnum):
    """Outcome of a pull; the largest of all ranks holds for all."""

    BATCH = 0
    NOTHING = 1
    OVER = 2
    STOPPED = 3


class Lockstep(Generic[B]):
    """Pulls of all ranks: all have their shard of the same step, or none continues."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._held: B | None = None

    def pull(self, ask: Callable[[], B | None]) -> B | None:
        """Return this rank's shard of a batch once all ranks have theirs; None if they have to pull again.

        Args:
            ask: Waits for the shard, for a bounded time.

        Raises:
            StoppedError, EndOfReplayError: `ask` raised it, on this rank or another.
        """
        error: BaseException | None = None
        if self._held is None:
            try:
                self._held = ask()
            except (StoppedError, EndOfReplayError) as raised:
                error = raised
        worst = self._ranks.most(self._outcome(error))
        if worst == _Outcome.STOPPED:
            raise error if isinstance(error, StoppedError) else StoppedError
        if worst == _Outcome.OVER:
            raise error or EndOfReplayError("another rank reached the end of the replay")
        if not self._all_of_one_lease() or worst == _Outcome.NOTHING:
            return None
        batch, self._held = self._held, None
        return batch

    def _outcome(self, error: BaseException | None) -> _Outcome:
        if isinstance(error, StoppedError):
            return _Outcome.STOPPED
        if error is not None:
            return _Outcome.OVER
        return _Outcome.NOTHING if self._held is None else _Outcome.BATCH

    def _all_of_one_lease(self) -> bool:
        """If shards belong to different leases, drop all: a live lease delivers its shard again.

        Lease numbers do not tell which is live: a broker without a journal starts numbering again.
        """
        if self._ranks.size == 1:
            return True
        newest = self._ranks.most(_lease(self._held))
        if self._ranks.most(int(self._held is not None and _lease(self._held) != newest)):
            self._held = None
        return self._ranks.most(int(self._held is None)) == 0


def _lease(batch: Any) -> int:
    return -1 if batch is None else int(batch.lease << 20) + int(batch.generation)


class NoSharedWeights:
    """Placeholder for the shared weights on ranks that do not own them."""

    def writing(self, _version: PolicyVersion) -> AbstractContextManager[None]:
        """Lock nothing: there are no readers."""
        return nullcontext()


class _Address(msgspec.Struct, frozen=True):
    """`ranks.json`."""

    port: int
    nonce: str


@contextmanager
def met(file: Path, rank: int, size: int, patience_s: float) -> Iterator[Ranks]:
    """Meet the other ranks of a run, and leave them at the end.

    KeyboardInterrupt and its subclasses end the wait.

    Args:
        file: Address file of the store.
        rank: This rank.
        size: Number of ranks.
        patience_s: Longest wait for another rank, here and in every collective call.

    Raises:
        ConfigError: The rank does not exist.
        RankSilentError: Another rank does not come, or does not respond.
        RankLostError: Another rank ended; also replaces errors inside the block that follow from it.
    """
    if rank >= size:
        raise ConfigError("trainer.ranks", f"must be above {rank} for rank {rank} (got {size})")
    if size == 1:
        yield Ranks()
        return
    os.environ["GLOO_SOCKET_IFNAME"] = (
        LOOPBACK  # also if the user names another one, for trainers of several hosts
    )
    with _noticing_losses(patience_s):
        store = _opened(file) if rank == 0 else _found(file, patience_s)
        store.set(f"here/{rank}", "")
        _await_all(store, size, patience_s)
        # A rank that died since it came is missed here, unless it is back in time and takes its place again.
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=patience_s)
        )
        if rank == 0:
            store.set(_BEGUN, "")
        try:
            yield ManyRanks(rank, size)
        finally:
            dist.destroy_process_group()


@contextmanager
def _noticing_losses(patience_s: float) -> Iterator[None]:
    """Translate errors of torch that mean the end of another rank. Most have no class of their own."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            logger.warning("rank lost error=%s", error)
            timed_out = re.search("timed out|timeout", str(error), re.IGNORECASE)
            raise (RankSilentError(patience_s) if timed_out else RankLostError) from error
        raise


def _opened(file: Path) -> Any:
    """Open the store of a new meeting on loopback: torch itself would listen on every interface."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )  # the store closes the socket
    address = _Address(port, secrets.token_hex(8))
    write_json(file, address)
    return PrefixStore(address.nonce, store)


def _await_all(store: Any, size: int, patience_s: float) -> None:
    """Wait until every rank is there."""
    until = time.monotonic() + patience_s
    while missing := [each for each in range(size) if not store.check([f"here/{each}"])]:
        if time.monotonic() > until:
            raise RankSilentError(patience_s, missing)
        time.sleep(LOOK_S)


def _found(file: Path, patience_s: float) -> Any:
    """Wait for a meeting that has not begun."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        address = read_json(file, _Address)
        if address is not None and _listens(address.port):
            with suppress(dist.DistError, RuntimeError):
                store = TCPStore(HOST, address.port, is_master=False, timeout=timedelta(seconds=JOIN_S))
                meeting = PrefixStore(address.nonce, store)
                if not meeting.check([_BEGUN]):
                    return meeting
        time.sleep(LOOK_S)
    raise RankSilentError(patience_s, [0])


def _listens(port: int) -> bool:
    """Return whether the port accepts connections: the address may be outdated, and torch would log at length."""
    try:
        socket.create_connection((HOST, port), JOIN_S).close()
    except OSError:
        return False
    return True
