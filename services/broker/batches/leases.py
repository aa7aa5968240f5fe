"""Leases: groups handed to a consumer group, as a rule one step to all its ranks.

A lease fixes composition and shards. It ends in one of two ways. Settled: every rank has reported the outcome of its
shard. Lost: its groups return to their places in the queue, and later reports of its ranks are fenced by the
generation. Every rank must send heartbeats and make progress; a hung rank cannot hold the others for ever.

A stream has one leased step at a time, or a window: leases of a consumer without other ranks, which settles group by
group. The groups of one settlement are carved out of the window's leases into a lease of their own, and it ends. The
leases of a window live and are lost together.

A rank settles provisionally while others have yet to settle. If the lease is lost in between, the rank's next pull
tells it so.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.requests import Pull, Settle
from rolloutmq.services.broker.batches.shards import Outcome, outcomes
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.groups import Stream

REMEMBERED: Final = 64
"""Number of remembered ended leases, so a repeated request gets the same answer."""
VOID_LIMIT: Final = 4096
"""Most remembered void settlements: a lease has one for each rank."""


class RankShard(msgspec.Struct, eq=False):
    """One rank's shard of a lease.

    Attributes:
        share: Its groups, with what they are together.
        consumer: The consumer that pulled it; empty until then.
        progress_at: When the rank last showed progress; before its pull, when the lease began.
        settle: The rank's settlement; None until then.
        handed_at: When a consumer last pulled it, wall-clock seconds; NaN until then and in a later life of the broker.
    """

    share: BatchShare
    progress_at: float
    consumer: str = ""
    request_id: str = ""
    settle: Settle | None = None
    handed_at: float = math.nan
    _outcomes: list[Outcome] | None = None

    def settled_by(self, settle: Settle) -> bool:
        """Settle it; False, and no change, if the lists of `settle` do not match its groups."""
        found = outcomes(self.groups, settle)
        if found is None:
            return False
        self.settle, self._outcomes = settle, found
        return True

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each group of a settled shard."""
        if self._outcomes is None:
            assert self.settle is not None
            self._outcomes = outcomes(self.groups, self.settle)
            assert self._outcomes is not None
        return self._outcomes

    @property
    def groups(self) -> Sequence[StoredGroup]:
        return self.share.groups


class Lease(msgspec.Struct, eq=False, kw_only=True):
    """One leased step."""

    number: int
    generation: int
    stream: Stream
    step: int
    version: PolicyVersion
    sequences: int
    tokens: int = 0
    window: int = 0
    """That of its pull; 0 for a step, of which a stream has one at a time."""
    parts: list[RankShard]
    short: bool = False
    rewound: bool = False
    """Its groups were settled before, or were leased when their trainer was rewound."""
    over: bool = False
    """It has more than was requested; see `measure`."""
    moments: dict[str, Moments] = {}
    """Moments of the scores of each environment, as of the first lease of the batch."""

    @property
    def split(self) -> Split:
        return self.stream[1]

    @property
    def groups(self) -> Iterator[StoredGroup]:
        return (group for part in self.parts for group in part.groups)

    @property
    def settled(self) -> bool:
        return None not in [part.settle for part in self.parts]

    @property
    def policy_after(self) -> PolicyVersion:
        """The policy after it, once it is settled."""
        return max([part.settle.version for part in self.parts if part.settle is not None])

    @property
    def delivered(self) -> bool:
        """Whether a consumer has pulled any of its shards."""
        return any(part.consumer for part in self.parts)

    def measure(self) -> None:
        """Note whether the lease exceeds the request: a single large group, or a rewound batch returned whole."""
        if self.window:
            return
        groups = has = 0
        for part in self.parts:
            for totals in part.share.lanes:
                groups += totals.groups
                has += totals.tokens if self.tokens else totals.sequences
        if self.rewound or groups <= 1:
            self.over = has > (self.tokens or self.sequences)

    def held_by(self, consumer: str) -> Iterator[RankShard]:
        """Yield the shards a consumer has pulled and not settled."""
        return (p for p in self.parts if p.consumer == consumer and p.settle is None)

    def fits(self, pull: Pull) -> bool:
        """Return whether a pull is for this very step, or for a lease of the window."""
        if self.window:
            return pull.window > 0
        return (self.step, self.sequences, self.tokens, len(self.parts)) == (
            pull.step,
            pull.sequences,
            pull.tokens,
            pull.world_size,
        )

    def expired(self, now: float, lease_s: float) -> bool:
        """Return whether a rank made no progress for too long."""
        return self.expires_at(lease_s) <= now

    def expires_at(self, lease_s: float) -> float:
        """Return when the lease is lost if no rank shows progress until then."""
        return self.waits_since + lease_s

    @property
    def waits_since(self) -> float:
        """When the rank that shows no progress for longest showed some last; infinite if all have settled."""
        since = math.inf
        for part in self.parts:
            if part.settle is None and part.progress_at < since:
                since = part.progress_at
        return since

    def missing(self, now: float, lease_s: float) -> int | None:
        """Return a rank that has not pulled its shard for the time of a lease; None if there is none."""
        parts = enumerate(self.parts)
        return next((r for r, part in parts if not part.consumer and part.progress_at + lease_s <= now), None)


class Window:
    """The leases of a stream whose consumer settles group by group, by number.

    Attributes:
        leases: The leases, oldest first.
        held: Groups of all its leases.
        consumer: The consumer; empty before the first delivery.
        progress_at: When the consumer last showed progress; before the first delivery, when its newest lease began.
    """

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.held = 0
        self.consumer = ""
        self.progress_at = -math.inf
        self._of_request: dict[str, Lease] = {}
        self._undelivered: dict[int, Lease] = {}

    def add(self, lease: Lease) -> None:
        """Add a new lease, or one of an earlier life."""
        self.leases[lease.number] = lease
        self.held += len(lease.parts[0].groups)
        self.progress_at = max(self.progress_at, lease.parts[0].progress_at)
        self._undelivered[lease.number] = lease
        self.delivered(lease)

    def delivered(self, lease: Lease) -> None:
        """Note which request a lease answers, if its consumer has pulled it."""
        part = lease.parts[0]
        if part.consumer:
            self.consumer = part.consumer
            self._of_request[part.request_id] = lease
            self._undelivered.pop(lease.number, None)

    def remove(self, lease: Lease) -> None:
        """Remove a lease with the groups that it has left."""
        del self.leases[lease.number]
        self.held -= len(lease.parts[0].groups)
        self._undelivered.pop(lease.number, None)
        if self._of_request.get(lease.parts[0].request_id) is lease:
            del self._of_request[lease.parts[0].request_id]

    def take(self, lease: Lease, groups: Container[int]) -> None:
        """Take groups out of a lease, by their object identities."""
        part = lease.parts[0]
        left = [group for group in part.groups if id(group) not in groups]
        self.held -= len(part.groups) - len(left)
        part.share = BatchShare(left)

    def answer(self, request_id: str) -> Lease | None:
        """Return the lease that a request got before, or else one that no consumer has pulled yet."""
        return self._of_request.get(request_id) or next(iter(self._undelivered.values()), None)


class VoidSettlement(msgspec.Struct):
    """A provisional settlement whose lease was lost; the answer to one pull tells it."""

    lease: int
    generation: int
    """That of the lease; a consumer with a higher one has registered since, and is told nothing."""
    step: int
    request_id: str = ""
    """That pull, or a repeated settlement; empty before. A restart forgets it, and a rank without a new shard is told
    again."""


class EndedLease(msgspec.Struct, frozen=True, eq=False):
    """A remembered settled lease."""

    generation: int
    step: int
    settles: tuple[Settle, ...]
    requests: frozenset[tuple[str, str]]


class Leases:
    """Open leases by stream and by number, and the last ones that ended."""

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}
        self._of_stream: dict[Stream, Lease] = {}
        self._windows: dict[Stream, Window] = {}
        self._ended: OrderedDict[int, EndedLease] = OrderedDict()
        self._ended_of: dict[tuple[str, str], list[EndedLease]] = {}
        """The same ones by consumer and request, in the order of their end."""
        self.void: dict[tuple[str, Split], VoidSettlement] = {}
        """Void settlements by consumer and split."""
        self._lost: dict[Stream, PolicyVersion] = {}
        """The earliest policy of the leases of a stream that were lost since its last settled one."""
        self.last_number = 0
        self.generation = 0
        """Highest number given to a lease or to a registration of a consumer."""

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def next_generation(self) -> int:
        """Return a higher number than any before."""
        self.generation += 1
        return self.generation

    def steps(self) -> list[Lease]:
        """Return the leased steps."""
        return list(self._of_stream.values())

    def windows(self) -> list[tuple[Stream, Window]]:
        """Return the windows that hold a lease."""
        return list(self._windows.items())

    def of(self, stream: Stream) -> Lease | None:
        """Return the leased step of a stream."""
        return self._of_stream.get(stream)

    def window_of(self, stream: Stream) -> Window | None:
        """Return the window of a stream, if it holds a lease."""
        return self._windows.get(stream)

    def of_stream(self, stream: Stream) -> list[Lease]:
        """Return the leased step, or the leases of the window, oldest first."""
        step, window = self.of(stream), self.window_of(stream)
        return [step] if step is not None else list(window.leases.values()) if window is not None else []

    def holders(self) -> set[str]:
        """Return the consumers that have pulled what is leased."""
        steps = {part.consumer for lease in self._of_stream.values() for part in lease.parts}
        return steps | {window.consumer for window in self._windows.values()}

    def advanced(self, consumer: str, now: float) -> None:
        """Note that a consumer makes progress with all that it holds."""
        for lease in self._of_stream.values():
            for part in lease.held_by(consumer):
                part.progress_at = now
        for window in self._windows.values():
            if window.consumer == consumer:
                window.progress_at = now

    def expire_at(self, lease_s: float) -> float:
        """Return when the first of the open leases is lost if no consumer shows progress until then."""
        since = math.inf
        for lease in self._of_stream.values():
            since = min(since, lease.waits_since)
        for window in self._windows.values():
            since = min(since, window.progress_at)
        return since + lease_s

    def find(self, number: int, generation: int) -> Lease | EndedLease | None:
        """Return the lease, open or settled, if the generation matches."""
        lease: Lease | EndedLease | None = self._open.get(number) or self._ended.get(number)
        return lease if lease is not None and lease.generation == generation else None

    def next_number(self) -> int:
        return self.last_number + 1

    def open(self, lease: Lease) -> None:
        """Add a new lease, or one of an earlier life."""
        if lease.number > self.last_number:
            self.last_number = lease.number
        if lease.generation > self.generation:
            self.generation = lease.generation
        lease.measure()
        self._open[lease.number] = lease
        if lease.window:
            self._windows.setdefault(lease.stream, Window()).add(lease)
        else:
            self._of_stream[lease.stream] = lease

    def end(self, lease: Lease) -> None:
        """Close a settled lease and remember its outcome."""
        self._close(lease)
        self._lost.pop(lease.stream, None)
        settles = tuple([part.settle for part in lease.parts if part.settle is not None])
        requests = frozenset([(part.consumer, part.request_id) for part in lease.parts])
        self.remember(lease.number, EndedLease(lease.generation, lease.step, settles, requests))

    def remember(self, number: int, ended: EndedLease) -> None:
        """Remember how a lease ended, and forget the one that ended longest ago."""
        self._ended[number] = ended
        for request in ended.requests:
            self._ended_of.setdefault(request, []).append(ended)
        if len(self._ended) > REMEMBERED:
            _, forgotten = self._ended.popitem(last=False)
            for request in forgotten.requests:
                self._ended_of[request].remove(forgotten)
                if not self._ended_of[request]:
                    del self._ended_of[request]

    def lose(self, lease: Lease) -> None:
        """Close a lease without an outcome. It is not remembered, so its ranks are fenced; settlements are void."""
        self._close(lease)
        if lease.window:  # its consumer settles by itself, and its policy is always the settled one
            return
        before = self._lost.pop(lease.stream, lease.version)
        self._lost[lease.stream] = min(lease.version, before, key=lambda policy: policy.step)
        for part in lease.parts:
            if part.settle is not None:
                self.void[part.consumer, lease.split] = VoidSettlement(
                    lease.number, lease.generation, lease.step
                )
        while len(self.void) > VOID_LIMIT:
            del self.void[next(iter(self.void))]
        while len(self._lost) > VOID_LIMIT:
            del self._lost[next(iter(self._lost))]

    def _close(self, lease: Lease) -> None:
        del self._open[lease.number]
        if not lease.window:
            del self._of_stream[lease.stream]
            return
        window = self._windows[lease.stream]
        window.remove(lease)
        if not window.leases:
            del self._windows[lease.stream]

    def carve(self, number: int, generation: int, share: BatchShare, numbers: Container[int]) -> Lease:
        """Take groups out of the window of one consumer, into a new lease of its own; close leases without a group.

        Args:
            number: Number of the new lease.
            generation: Its generation.
            share: The groups.
            numbers: Numbers of the leases that hold them.
        """
        own = set(map(id, share.groups))
        sources = [lease for lease in self._open.values() if lease.number in numbers]
        first = sources[0]
        progress_at = self._windows[first.stream].progress_at
        for lease in sources:
            self._windows[lease.stream].take(lease, own)
            if not lease.parts[0].groups:
                self._close(lease)
        carved = Lease(
            number=number,
            generation=generation,
            stream=first.stream,
            step=max(lease.step for lease in sources),
            version=max(lease.version for lease in sources),
            sequences=0,
            window=first.window,
            parts=[RankShard(share, progress_at)],
            rewound=first.rewound,
            moments=sources[-1].moments,
        )
        self.open(carved)
        return carved

    def void_for(self, pull: Pull, generation: int) -> VoidSettlement | None:
        """Return the void settlement to tell this pull of a consumer's life; a later pull is told nothing."""
        void = self.void.get((pull.consumer, pull.split))
        if void is None or void.generation < generation:
            return None
        void.request_id = void.request_id or pull.request_id
        return void if void.request_id == pull.request_id else None

    def told(self, settle: Settle) -> None:
        """Note that the answer to a repeated settlement tells its loss: no pull is told it once more."""
        for split in Split:
            void = self.void.get((settle.consumer, split))
            if void is not None and void.lease == settle.lease:
                void.request_id = void.request_id or f"settlement of lease {settle.lease}"

    def lost_policy(self, stream: Stream) -> PolicyVersion | None:
        """Return the earliest policy of the leases lost since the stream's last settled one."""
        return self._lost.get(stream)

    def forget_void(self, consumer: str, splits: Iterable[Split] = tuple(Split)) -> None:
        """Forget the void settlements of a consumer: it registered anew, or pulled its next shard."""
        for split in splits:
            self.void.pop((consumer, split), None)

    def hand_out(self, lease: Lease, rank: int, consumer: str, request_id: str) -> None:
        """Note which consumer pulled a shard, by which request."""
        part = lease.parts[rank]
        part.consumer, part.request_id = consumer, request_id
        if lease.window:
            self._windows[lease.stream].delivered(lease)
        self.void.pop((consumer, lease.split), None)

    def ended(self) -> Iterator[tuple[int, EndedLease]]:
        """Yield the remembered leases, oldest first."""
        return iter(self._ended.items())

    def numbered(self, number: int) -> Lease | None:
        return self._open.get(number)

    def ended_of(self, consumer: str, request_id: str) -> Sequence[EndedLease]:
        """Return the remembered leases of a request, oldest first: a request is over if it has one."""
        return self._ended_of.get((consumer, request_id), ())

    def clear(self) -> None:
        """Forget everything but the numbers."""
        self.void.clear()
        self._lost.clear()
        self._open.clear()
        self._of_stream.clear()
        self._windows.clear()
        self._ended.clear()
        self._ended_of.clear()

    def validate(self) -> None:
        """Assert that both indexes hold the same leases and that no group is in two of them."""
        steps = {lease.number for lease in self._of_stream.values()}
        windows = [lease for window in self._windows.values() for lease in window.leases.values()]
        assert all(lease.window and any(lease.groups) for lease in windows)
        for window in self._windows.values():
            assert window.held == sum(len(lease.parts[0].groups) for lease in window.leases.values())
        assert len(steps) + len(windows) == len(self._open)
        assert steps | {lease.number for lease in windows} == set(self._open)
        ids = [id(group) for lease in self for group in lease.groups]
        assert len(ids) == len(set(ids))
        assert not any(lease.settled for lease in self)
        ended = [request for one in self._ended.values() for request in one.requests]
        assert Counter(ended) == {request: len(found) for request, found in self._ended_of.items()}
