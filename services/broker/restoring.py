"""Bringing an earlier life of the broker back: the items of its snapshot, then its facts, by the code that made them.

Whatever is damaged on disk may leave facts that speak of what is not known. Such a fact is passed over and named;
the rest goes on.
"""

from collections.abc import Callable, Iterable
from typing import Any

from rolloutmq.schemas.control import Drain
from rolloutmq.schemas.delivery import RegisterProducer
from rolloutmq.schemas.errors import DamagedJournalError
from rolloutmq.services.broker.audit import audit
from rolloutmq.services.broker.consuming import Consuming
from rolloutmq.services.broker.journal import facts as f
from rolloutmq.services.broker.journal.packing import AnyFact
from rolloutmq.services.broker.leases import Lease, Part
from rolloutmq.services.broker.ledger import State as Place
from rolloutmq.services.broker.operating import Operating
from rolloutmq.services.broker.producing import Producing
from rolloutmq.services.broker.rates import Rate
from rolloutmq.services.broker.settlement import fates, orders
from rolloutmq.services.broker.state import State
from rolloutmq.services.broker.tasks import TASK_FACTS
from rolloutmq.services.broker.unpacking import Shards, Source, Unpacking


class UnknownReferenceError(Exception):
    """A fact speaks of something that is not known."""


def restore(
    state: State,
    operating: Operating,
    producing: Producing,
    consuming: Consuming,
    facts: Iterable[AnyFact],
    source: Source,
    now: float,
    wall: float,
) -> list[str]:
    """Apply items and facts to a new state; return what does not fit together, a line each."""
    restoring = Restoring(state, operating, producing, consuming, source, now, wall)
    recording, state.log.recording, state.outbox.muted = state.log.recording, False, True
    for fact in facts:
        restoring.apply(fact)
    restoring.finish()
    if restoring.problems:
        _require_sound(state)
    state.log.recording, state.outbox.muted = recording, False
    state.outbox.drop_all()
    return restoring.problems


def _require_sound(state: State) -> None:
    """Refuse a state that contradicts itself; DamagedJournalError."""
    try:
        audit(state)
    except AssertionError as error:
        raise DamagedJournalError(f"the facts that are left contradict each other: {error}") from None


class Restoring(Unpacking):
    """Applies facts, one at a time."""

    def __init__(
        self,
        state: State,
        operating: Operating,
        producing: Producing,
        consuming: Consuming,
        source: Source,
        now: float,
        wall: float,
    ) -> None:
        super().__init__(state, source, now, wall)
        self.problems: list[str] = []
        self._operating = operating
        self._producing = producing
        self._consuming = consuming
        self._apply |= self._of_facts()

    def _of_facts(self) -> dict[type[f.Fact], Callable[[Any], object]]:
        state = self._state
        return {
            f.Accepted: self._accepted,
            f.Skipped: self._skipped,
            f.Opened: self._opened,
            f.Declared: self._declared,
            f.Produced: self._produced,
            f.Joined: lambda fact: self._consuming.join(fact, self._now),
            f.Leased: self._leased,
            f.Pulled: self._pulled,
            f.Settles: self._settles,
            f.Lost: self._lost,
            f.Dropped: self._dropped,
            f.Committed: lambda fact: state.settlement.commit(fact.group, fact.version),
            f.Forgot: lambda fact: state.settlement.forget_oldest(fact.group, fact.batches),
            f.Rewound: self._rewound,
            f.Requeued: self._requeued,
            f.Disconnected: lambda fact: self._operating.leave(fact.env),
            f.WasReset: lambda fact: self._operating.forget(self._wall, fact.lost),
            f.Wanted: lambda fact: state.wanted.update({fact.env: fact.count}),
            f.GpuAsked: state.gpu_orders.apply,
            f.Told: self._told,
            f.Tuned: lambda fact: self._operating.tuning.restore(fact.values, self._now),
            f.Began: lambda _: None,
            **dict.fromkeys(TASK_FACTS, lambda fact: state.tasks.apply(fact, self._now, self._wall)),
        }

    def apply(self, fact: AnyFact) -> None:
        """Change the state as the fact says, or note that it does not fit."""
        try:
            self._apply[type(fact)](fact)
        except (UnknownReferenceError, KeyError, ValueError, IndexError) as error:
            self.problems.append(f"{type(fact).__name__} does not fit: {error}")

    def finish(self) -> None:
        """Queue what no item spoke of, and begin: nobody has been heard of yet."""
        self.queue_loose()
        state = self._state
        state.sessions.rest(self._now)
        for lane in state.lanes:
            lane.arrivals = Rate()
        state.pacing.batch_sequences = state.run.batch_sequences
        state.pacing.batch_tokens = state.run.batch_tokens
        state.repace = True

    def _accepted(self, fact: f.Accepted) -> None:
        state = self._state
        session = state.sessions.numbered(fact.session)
        header = fact.header
        if session is not None and not fact.requeued and not session.window.seen(header.seq):
            session.window.accept(header.seq, header.position, header.nbytes)
        if state.groups.find(fact.order) is not None:
            return
        group = self._stored(fact)
        lane = state.lanes.open(group.env, group.split, self._now)
        late = fact.order < state.groups.next_order
        state.admit(group, lane, self._now)
        if late:  # its fact was lost, and its record came to light behind those of others
            lane.remove(group)
            lane.put_back([group])

    def _skipped(self, fact: f.Skipped) -> None:
        session = self._state.sessions.numbered(fact.session)
        if session is not None and not session.window.seen(fact.seq):
            session.window.accept(fact.seq, fact.position, fact.nbytes)

    def _opened(self, fact: f.Opened) -> None:
        state = self._state
        asked = RegisterProducer(
            producer=fact.producer,
            env=fact.env,
            split=fact.split,
            slots=fact.slots,
            group_size=fact.group_size,
            weight=fact.weight,
            min_share=fact.min_share,
            resume_session=fact.number,
            pid=fact.pid,
            host=fact.host,
        )
        lane = self._producing.lane(asked, self._now)
        session = state.sessions.open(asked, lane, self._now, fact.number)
        session.draining, session.produced_before = fact.draining, fact.produced_before

    def _declared(self, fact: f.Declared) -> None:
        self._tables.update({table.id: table for table in fact.tables})
        session = self._state.sessions.numbered(fact.session)
        if session is not None:
            session.declare(fact.tables)

    def _produced(self, fact: f.Produced) -> None:
        session = self._state.sessions.numbered(fact.session)
        if session is not None:
            session.produced, session.closed = fact.produced, fact.closed
            session.abandoned = max(session.abandoned, fact.abandoned)

    def _leased(self, fact: f.Leased) -> None:
        state = self._state
        stream = fact.group, fact.split
        if (former := state.leases.of(stream)) is not None:
            state.settlement.give_back(former, failed=False)
            self.problems.append(f"what became of lease {former.number} is lost: its groups come again")
        if fact.again and _flat(orders(state.settlement.returns_next(stream))) != _flat(fact.shards):
            raise UnknownReferenceError(f"lease {fact.number} is not of the batch that comes again")
        lease = Lease(
            number=fact.number,
            generation=fact.generation,
            stream=stream,
            step=fact.step,
            version=fact.version,
            sequences=fact.sequences,
            tokens=fact.tokens,
            parts=[Part(groups, self._now) for groups in state.settlement.take(fact)],
            short=fact.short,
            rewound=fact.again,
        )
        state.settlement.hold(lease)
        if not fact.again:
            state.former.count(lease.groups, fact.version)
        if fact.split == 0:
            state.run.pulled(fact.sequences, fact.tokens)
            state.run.leased(lease)

    def _find(self, lease: int) -> Lease:
        found = self._state.leases.numbered(lease)
        if found is None:
            raise UnknownReferenceError(f"lease {lease} is not known")
        return found

    def _pulled(self, fact: f.Pulled) -> None:
        part = self._find(fact.lease).parts[fact.rank]
        part.consumer, part.request_id = fact.consumer, fact.request_id

    def _settles(self, fact: f.Settles) -> None:
        lease = self._find(fact.settle.lease)
        part = lease.parts[fact.settle.rank]
        if fates(part, fact.settle) is None:
            self._state.settlement.give_back(lease, failed=False)
            raise UnknownReferenceError(f"the groups of lease {lease.number} are not those that were settled")
        part.settle = fact.settle
        if lease.settled:
            self._state.settlement.conclude(lease, self._wall)
            self._consuming.moved_on(lease)

    def _lost(self, fact: f.Lost) -> None:
        settlement, lease = self._state.settlement, self._find(fact.lease)
        if fact.recalled:
            settlement.recall(lease, apart=fact.apart)
        else:
            settlement.give_back(lease, failed=fact.failed, apart=fact.apart)

    def _dropped(self, fact: f.Dropped) -> None:
        group = self._state.groups.find(fact.order)
        if group is None:
            raise UnknownReferenceError(f"group {fact.order} is not known")
        self._state.dropping.drop([group], Place(fact.state), fact.reason, self._wall)

    def _rewound(self, fact: f.Rewound) -> None:
        state = self._state
        state.settlement.bring_back(fact.group, fact.version)
        state.consumers.resumptions[fact.group] = fact.version, {fact.consumer}
        state.run.resumed(fact.version)

    def _requeued(self, fact: f.Requeued) -> None:
        self._state.ledger.requeued()
        self._state.requeued.add(fact.order)

    def _told(self, fact: f.Told) -> None:
        workers = self._state.workers
        if fact.told:
            workers.tell(Drain(worker=fact.worker, reason=fact.reason), fact.pid)
        else:
            workers.untell(fact.worker)


def _flat(shards: Shards) -> list[int]:
    """Return the groups of a batch, however it is cut among ranks."""
    return sorted(order for rank in shards for order in rank)
