"""Windows: groups of several leases that one consumer holds and settles group by group.

A trainer that buffers groups and trains on any mix of them pulls them as they come, and holds up to `Pull.window` times
`Pull.groups` of them. In how many leases they came does not count: a lease may have one group, because no other was
there, or because it is delivered alone. A rewound batch comes as a whole, also where it exceeds the limit.

`SettleGroups` names groups of any of them: they are carved out into a lease of their own, which ends as every
lease does, so a checkpoint, a rewind and the ledger treat what was settled together as one batch. Groups of the rewind
queue count against another account than new ones, and are carved out apart.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import ErrorReply, Settled, Wait
from rolloutmq.schemas.wire.requests import Pull, Settle, SettleGroups
from rolloutmq.services.broker.batches.leases import Lease
from rolloutmq.services.broker.broker_state import BrokerState, refuse, taken_over
from rolloutmq.services.broker.journal.format.events import Settles
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.groups import Stream

End = Callable[[Lease, float, float], None]
"""Ends a settled lease, at a monotonic and a wall-clock time."""


def unfit(pull: Pull) -> ErrorReply | None:
    """Refuse a pull whose size and window contradict each other."""
    if sum(map(bool, (pull.sequences, pull.tokens, pull.groups))) != 1:
        return refuse(
            ErrorCode.INVALID,
            "pull: set exactly one of sequences, tokens and groups "
            f"(got {pull.sequences}, {pull.tokens} and {pull.groups})",
        )
    if bool(pull.groups) != bool(pull.window):
        return refuse(
            ErrorCode.INVALID,
            f"pull.window: must be at least 1 with groups, and 0 without (got {pull.window})",
        )
    if pull.groups and pull.world_size > 1:
        return refuse(
            ErrorCode.INVALID,
            f"pull.groups: a consumer of {pull.world_size} ranks pulls steps, which all ranks share; "
            "set sequences or tokens",
        )
    return None


class WindowRequests:
    """Leases groups as they come, and settles them one by one.

    Args:
        state: The broker's state.
        end: Ends a settled lease.
    """

    def __init__(self, state: BrokerState, end: End) -> None:
        self._state = state
        self._end: Final = end

    def lease(self, stream: Stream, pull: Pull, now: float, wall: float) -> Lease | Wait:
        """Return the lease of this very request, or a new one, or why there is none."""
        state = self._state
        if state.leases.of(stream) is not None:
            return Wait.LEASED_ELSEWHERE
        window = state.leases.window_of(stream)
        if window is not None and window.consumer not in {"", pull.consumer}:
            return Wait.LEASED_ELSEWHERE
        if window is not None and (answer := window.answer(pull.request_id)) is not None:
            return answer
        room = pull.window * pull.groups - (window.held if window is not None else 0)
        if room <= 0:
            return Wait.UNSETTLED
        # A settlement may have come while the pull waited.
        version = max(pull.version, state.run.present)
        pull = replace(pull, version=version, groups=min(pull.groups, room))
        found = state.transitions.lease(stream, pull, now, wall)
        if found is Wait.NO_BATCH and window is not None and self._is_full(pull.split):
            return Wait.UNSETTLED
        return found

    def _is_full(self, split: Split) -> bool:
        """Return whether no group can come before the consumer settles some."""
        permits = self._state.permits
        return self._state.credits.exhausted(split) or (not permits.stalled and permits.used_up(split))

    def expire(self, now: float, wall: float) -> None:
        """Take the leases of dead and hung consumers back."""
        state = self._state
        moment = now - state.config.broker.silence_s
        for _, window in state.leases.windows():
            silent = bool(window.consumer) and state.consumers.silent_since(window.consumer, moment)
            if not silent and window.progress_at + state.config.broker.lease_s > now:
                continue
            failed = bool(window.consumer)
            why = f"{window.consumer} fell silent" if silent else "no progress" if failed else "never pulled"
            leases = list(window.leases.values())
            state.transitions.lose_together(leases, wall, failed=failed, why=why)
            state.permits_due = True

    def settle(self, request: SettleGroups, now: float, wall: float) -> Settled | ErrorReply:
        """End the named groups that the consumer holds; report the others as lost."""
        state = self._state
        consumer = state.consumers.heard(request.consumer, now)
        if consumer is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {request.consumer} is not registered")
        if state.consumers.fenced(request.consumer, request.generation):
            return taken_over(request.consumer)
        names = list(_named(request))
        if len(set(names)) < len(names):
            twice = Counter(names).most_common(1)[0][0]
            return refuse(ErrorCode.INVALID, f"settle_groups: group {twice} is named more than once")
        done = {group_id for settle in self._earlier(request) for group_id in _named(settle)}
        if not done:
            policy = state.consumers.settled_by(consumer.group) or request.version
            if request.trained and request.version < policy:
                return _behind(request.version, policy)
            request = replace(request, version=max(request.version, policy))
            done = self._settle_held(request, names, now, wall)
        return Settled(step=request.version.step, lost=tuple([name for name in names if name not in done]))

    def _earlier(self, request: SettleGroups) -> Iterator[Settle]:
        """Yield what this request has settled when it came before."""
        for ended in self._state.leases.ended_of(request.consumer, request.key):
            yield from ended.settles

    def _settle_held(self, request: SettleGroups, names: Sequence[str], now: float, wall: float) -> set[str]:
        """Settle the named groups that the consumer holds; return their ids."""
        held = self._held(request.consumer, set(names))
        done: set[str] = set()
        for again in (True, False):
            found = {name: held[name] for name in names if name in held and held[name][1].rewound is again}
            if found:
                self._settle_carved(request, found, now, wall)
                done |= found.keys()
        return done

    def _held(self, consumer: str, names: set[str]) -> "dict[str, _Held]":
        """Return the named groups of a consumer's window, by id.

        Groups of the same id and other contents are settled one after another, the oldest first.
        """
        held: dict[str, _Held] = {}
        for lease in self._state.leases:
            if lease.window and lease.parts[0].consumer == consumer:
                for group in lease.parts[0].groups:
                    name = group.header.group_id
                    if name in names and name not in held:
                        held[name] = group, lease
                if len(held) == len(names):
                    break
        return held

    def _settle_carved(
        self, request: SettleGroups, found: "Mapping[str, _Held]", now: float, wall: float
    ) -> None:
        """Settle groups that are all rewound, or none is."""
        state, share = self._state, BatchShare([group for group, _ in found.values()])
        sources = {lease.number: lease for _, lease in found.values()}
        self._measure(share, found, sources, wall)
        lease = state.transitions.carve(share, sources, request.consumer, request.key)
        settle = Settle(
            consumer=request.consumer,
            lease=lease.number,
            generation=lease.generation,
            version=request.version,
            trained=tuple([one for one in request.trained if one in found]),
            filtered=tuple([one for one in request.filtered if one in found]),
            rejected=tuple([one for one in request.rejected if one.group_id in found]),
        )
        part = lease.parts[0]
        matches = part.settled_by(settle)
        assert matches
        state.events.add(Settles(settle))
        if not lease.rewound:
            state.staleness.note_trained(part.share, set(settle.trained), request.version)
        self._end(lease, now, wall)

    def _measure(
        self, share: BatchShare, found: "Mapping[str, _Held]", sources: Mapping[int, Lease], wall: float
    ) -> None:
        """Count the time with the trainer, by hand-out."""
        if len(sources) == 1:
            (lease,) = sources.values()
            self._state.hops.settled(share, wall - lease.parts[0].handed_at)
            return
        handed: dict[float, list[StoredGroup]] = {}
        for group, lease in found.values():
            handed.setdefault(lease.parts[0].handed_at, []).append(group)
        for handed_at, groups in handed.items():
            self._state.hops.settled(BatchShare(groups), wall - handed_at)


_Held = tuple[StoredGroup, Lease]
"""A group of a consumer's window, and its lease."""


def _named(request: SettleGroups | Settle) -> Iterator[str]:
    yield from request.trained
    yield from request.filtered
    yield from (one.group_id for one in request.rejected)


def _behind(version: PolicyVersion, policy: PolicyVersion) -> ErrorReply:
    return refuse(
        ErrorCode.INVALID,
        f"settle_groups.version: must not be behind the policy of the last settlement, {policy} (got {version})",
    )
