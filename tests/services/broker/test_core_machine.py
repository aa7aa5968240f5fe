"""The whole core against a simple model: unreliable producers, a trainer that crashes, and a clock."""

from collections import Counter
from itertools import count

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.services.broker.bench import TABLE, Bench, Peer, config, header, ids

from rolloutmq.schemas.wire.control import Drain
from rolloutmq.schemas.wire.envelope import GroupHeader, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Ack, Batch, Ok, Registered, Rejected
from rolloutmq.schemas.wire.requests import Commit, DeclareTables, Goodbye, RegisterProducer, Settle
from rolloutmq.services.broker.journal.format.events import RetainedBatchSnapshot

BATCH = 8
LAST_CHANCE = 3
"""Failures after which a group goes out alone; one more ends it."""
SETTINGS = config(
    broker={
        "high_bytes": 6000,
        "max_group_bytes": 600,
        "retain_bytes": 2000,
        "exact_wait_s": 1.0,
        "silent_env_s": 3.0,
        "silence_s": 5.0,
        "lease_s": 20.0,
        "max_deliveries": LAST_CHANCE + 1,
    },
    batch=BATCH,
    paced={"pacing": True, "max_staleness": 2, "group_size": 3, "min_share": 0.25},
    free={"pacing": False, "stale": "pass", "weight": 2.0},
)
ENVS = ("paced", "paced", "free")
PRODUCER = st.integers(0, len(ENVS) - 1)


class Producer:
    """A model of the SDK's producer: a spool, credit, and a pipe that may lose."""

    def __init__(self, bench: Bench, number: int) -> None:
        self.name, self.env = f"p{number}", ENVS[number]
        self.bench = bench
        self.numbers = count()
        self.spool: dict[int, GroupHeader] = {}
        self.wire: list[tuple[int, GroupHeader]] = []
        self.acked: set[str] = set()
        self.orphans: set[str] = set()
        """Groups of a process that died before it saw an ack; the broker may have them or not."""
        self.session = self.begun = self.abandoned = 0
        self.ack: Ack | None = None
        self.gone = self.paused = False
        self.register(resume=False)

    def register(self, *, resume: bool) -> None:
        asked = RegisterProducer(
            producer=self.name,
            env=self.env,
            slots=3,
            group_size=3,
            resume_session=self.session if resume else 0,
            begun=self.begun if resume else 0,
            abandoned=self.abandoned if resume else 0,
        )
        ack = self.bench.ask(asked, Registered).ack
        if ack.session != self.session:
            heads = list(self.spool.values()) if resume else []
            if not resume:
                self.orphans |= {head.group_id for head in self.spool.values()}
            self.seq = self.position = 0
            self.spool = {}
            self.begun, self.abandoned, self.ack = len(heads), 0, None
            self.session = ack.session
            for head in heads:
                self._add(head.nbytes, head.sequences, head.oldest.step, head.group_id)
        self.gone = False
        self.bench.ask(DeclareTables(producer=self.name, session=self.session, tables=(TABLE,)), Ok)
        self.apply(ack)

    def _add(self, nbytes: int, sequences: int, step: int, group_id: str) -> GroupHeader:
        self.seq += 1
        self.position += nbytes
        head = header(
            self.seq,
            self.position,
            nbytes=nbytes,
            sequences=sequences,
            step=step,
            group_id=group_id,
        )
        self.spool[self.seq] = head
        return head

    def apply(self, ack: Ack) -> None:
        """Take over an ack. Acks of one session never fall in one life of the broker, but for one that is paused."""
        if ack.session != self.session:
            return
        if self.ack is not None and self.ack.epoch == ack.epoch:
            assert ack.cumulative >= self.ack.cumulative
            assert ack.byte_limit >= self.ack.byte_limit
            assert ack.start_limit >= min(self.ack.start_limit, self.begun if self.paused else 1 << 60)
        self.ack = ack
        gaps = int.from_bytes(ack.gaps, "little")
        for seq in list(self.spool):
            above = seq - ack.cumulative - 2
            if seq <= ack.cumulative or (above >= 0 and gaps >> above & 1):
                self.acked.add(self.spool.pop(seq).group_id)

    def may_begin(self) -> bool:
        assert self.ack is not None
        closed = self.gone or self.paused or self.ack.draining
        return not closed and self.begun < self.ack.start_limit

    def produce(self, nbytes: int, sequences: int) -> None:
        assert self.ack is not None
        self.begun += 1
        group_id = f"{self.name}.{next(self.numbers)}"
        self._add(nbytes, sequences, self.ack.policy.step, group_id)
        self.transmit()

    def transmit(self) -> None:
        """Send the groups with credit."""
        assert self.ack is not None
        under_way = {head.group_id for session, head in self.wire if session == self.session}
        for head in self.spool.values():
            if head.position <= self.ack.byte_limit and head.group_id not in under_way:
                self.wire.append((self.session, head))

    def deliver(self, index: int) -> None:
        session, head = self.wire.pop(index % len(self.wire))
        self._peer().deliver(head, session=session)

    def sync(self) -> None:
        if not self.gone:
            self.apply(Peer.sync(self._peer(), self.abandoned, begun=self.begun, paused=self.paused))

    def _peer(self) -> Peer:
        assert self.ack is not None
        return Peer(self.bench, self.name, self.env, Split.TRAIN, self.ack)


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.bench = Bench(SETTINGS)
        self.bench.shadowed = False
        self.producers = [Producer(self.bench, number) for number in range(len(ENVS))]
        self.batch: Batch | None = None
        self.step = self.committed = 0
        self.trained: dict[str, int] = {}
        """Groups the living weights learned from, with the step after."""
        self.filtered: set[str] = set()
        self.ended: set[str] = set()
        self.history: list[tuple[int, tuple[str, ...]]] = []
        """Settled batches since the last commit, as (version after, ids that survive)."""
        self.expected: list[tuple[str, ...]] = []
        """Batches to redeliver, in this order."""
        self.failures: Counter[str] = Counter()
        self.generation = self.bench.consumer()

    # The broker

    @rule(lost=st.booleans())
    def restart(self, lost: bool) -> None:
        """Kill and restart the broker; messages under way may be lost."""
        self.bench.restart()
        for producer in self.producers:
            if lost:
                producer.wire.clear()
            if not producer.gone:
                before = producer.session
                producer.register(resume=True)
                assert producer.session == before
        assert self.bench.consumer(generation=self.generation) == self.generation

    # Producers

    @rule(sizes=st.lists(st.tuples(PRODUCER, st.integers(1, 600), st.integers(1, 5)), max_size=9))
    def produce(self, sizes: list[tuple[int, int, int]]) -> None:
        for number, nbytes, sequences in sizes:
            producer = self.producers[number]
            if producer.may_begin():
                producer.produce(nbytes, sequences)

    @rule(number=PRODUCER, index=st.integers(0, 99), fate=st.sampled_from("ddddlt"))
    def transport(self, number: int, index: int, fate: str) -> None:
        """Deliver out of order, lose, or deliver twice."""
        producer = self.producers[number]
        if not producer.wire:
            return
        if fate == "l":
            producer.wire.pop(index % len(producer.wire))
            return
        if fate == "t":
            producer.wire.append(producer.wire[index % len(producer.wire)])
        producer.deliver(index)

    @rule()
    def deliver_all(self) -> None:
        for producer in self.producers:
            while producer.wire:
                producer.deliver(0)

    @rule()
    def sync(self) -> None:
        for producer in self.producers:
            producer.sync()
            if not producer.gone:
                producer.transmit()

    @rule(number=PRODUCER, what=st.sampled_from(["abandon", "new", "resume", "leave", "drain", "pause"]))
    def change(self, number: int, what: str) -> None:
        """Something happens to one producer."""
        producer = self.producers[number]
        if what in {"new", "resume"}:
            producer.register(resume=what == "resume")
        elif what == "drain":
            self.bench.ask(Drain(worker=producer.name), Ok)
        elif what == "pause":
            producer.paused = not producer.paused
            producer.sync()
            if not producer.gone and producer.paused:
                assert producer.ack is not None
                assert producer.ack.start_limit <= producer.begun
        elif what == "abandon" and producer.may_begin():
            producer.begun += 1
            producer.abandoned += 1
            producer.sync()
        elif what == "leave" and not producer.gone:
            name, session, produced = producer.name, producer.session, producer.seq
            self.bench.ask(Goodbye(producer=name, session=session, produced=produced), Ok)
            producer.gone = True

    # The trainer

    @precondition(lambda self: self.batch is None)
    @rule(budget=st.sampled_from([0, 0, 25, 60]))
    def pull(self, budget: int = 0) -> None:
        """By sequences, or by tokens if there is a budget."""
        size = {"tokens": budget} if budget else {}
        got = self.bench.pull(self.step, BATCH, **size)
        if not isinstance(got, Batch):
            return
        self.batch = got
        sequences = sum(d.header.sequences for d in got.groups)
        dead = {record.group_id for record in self.bench.dropped}
        alive = (tuple(i for i in batch if i not in dead) for batch in self.expected)
        self.expected = [batch for batch in alive if batch]
        if self.expected:
            assert got.rewound
            assert ids(got) == self.expected.pop(0)
        else:
            assert not got.rewound
            tokens = sum(d.header.tokens for d in got.groups)
            if budget:
                assert tokens <= budget or len(got.groups) == 1
            else:
                assert got.short == (sequences < BATCH)
        assert sequences <= BATCH
        for delivery in got.groups:
            assert delivery.header.group_id not in self.trained, "trained twice"
            assert delivery.header.group_id not in self.ended, "came after its end"

    @precondition(lambda self: self.batch is not None)
    @rule(fates=st.lists(st.sampled_from("tttttfr"), min_size=BATCH, max_size=BATCH))
    def settle(self, fates: list[str]) -> None:
        assert self.batch is not None
        groups = ids(self.batch)
        split = {kind: tuple(g for g, f in zip(groups, fates, strict=False) if f == kind) for kind in "tfr"}
        after = self.step + bool(split["t"])
        self.bench.settle(
            self.batch,
            version=PolicyVersion(0, after),
            trained=split["t"],
            filtered=split["f"],
            rejected=tuple(Rejected(group_id=g, reason="bad") for g in split["r"]),
        )
        self.step = after
        self.trained |= dict.fromkeys(split["t"], after)
        self.filtered |= set(split["f"])
        self.ended |= set(split["r"])
        kept = tuple(g for g in groups if g not in split["r"])
        if kept:
            self.history.append((after if split["t"] else -after, kept))
        if self.bench.core._state.ledger.forgotten:  # Of a trainer without checkpoints, only so much is kept.
            kept_now = sum(isinstance(item, RetainedBatchSnapshot) for item in self.bench.core.snapshot())
            del self.history[: len(self.history) - kept_now]
        self.batch = None

    @rule()
    def commit(self) -> None:
        self.bench.ask(Commit(consumer="c", version=PolicyVersion(0, self.step)), Ok)
        self.committed = self.step
        self.history.clear()

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.bench.send_beat()
        self.bench.tick(seconds)

    @rule()
    def crash_and_resume(self) -> None:
        """The trainer dies and starts again at its last checkpoint."""
        again = [kept for _, kept in self.history]
        if self.batch is not None:
            again.append(ids(self.batch))
        self.expected = again + self.expected
        if self.batch is not None:
            self.expected[len(again) - 1 : len(again)] = self.lost_again()
        self.generation = self.bench.consumer(resume=PolicyVersion(0, self.committed))
        taken = {group_id for kept in again for group_id in kept}
        # Forgotten groups, without a checkpoint, stay trained.
        self.trained = {g: n for g, n in self.trained.items() if n <= self.committed or g not in taken}
        self.filtered -= taken
        self.history.clear()
        self.batch = None
        self.step = self.committed

    @rule(steps=st.integers(1, 3))
    def run_smoothly(self, steps: int) -> None:
        """Everybody works for a while."""
        for _ in range(steps):
            for producer in self.producers:
                while producer.may_begin() and len(producer.spool) < 4:
                    producer.produce(50 + 100 * (producer.begun % 3), 1 + producer.begun % 4)
            self.deliver_all()
            self.pass_time(0.5)
            self.nothing_accepted_is_lost()
            if self.batch is not None:
                self.settle(["t"] * BATCH)
            self.pull()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def hang(self) -> None:
        """The trainer falls silent for so long that its lease is lost."""
        assert self.batch is not None
        again = self.lost_again()
        if self.batch.rewound:
            self.expected = again + self.expected
        self.bench.tick(6.0)
        late = Settle(
            consumer="c",
            lease=self.batch.lease,
            generation=self.batch.generation,
            version=PolicyVersion(0, self.step + 1),
            trained=ids(self.batch),
        )
        assert self.bench.refused(late).value == "lease_lost"
        self.generation = self.bench.consumer()
        self.batch = None

    def lost_again(self) -> list[tuple[str, ...]]:
        """Count a failure of the batch; return it as it is redelivered: split, if one more would end a group."""
        assert self.batch is not None
        groups = ids(self.batch)
        self.failures.update(groups)
        if max(self.failures[group] for group in groups) < LAST_CHANCE:
            return [groups]
        return [(group,) for group in sorted(groups, key=self.bench.order)]

    @invariant()
    def nothing_accepted_is_lost(self) -> None:
        bench = self.bench
        for publish in bench.published:
            if isinstance(publish.message, Ack):
                name = publish.topic.decode().removeprefix("ack.").removesuffix("/")
                self.producers[int(name[1:])].apply(publish.message)
        bench.published.clear()

    def teardown(self) -> None:
        """Everybody works on: the spools must empty, and every acked group must be somewhere."""
        if not hasattr(self, "bench"):
            return
        for producer in self.producers:
            producer.register(resume=True)
        idle, before = 0, -1
        while idle < 30:
            self._work_on()
            left = sum(len(p.spool) for p in self.producers) + self.bench.pressure().queued_groups
            idle = 0 if left != before else idle + 1
            before = left
            if not left:
                break
        assert not any(p.spool for p in self.producers), "a spool never emptied"
        self._account()

    def _work_on(self) -> None:
        for producer in self.producers:
            producer.sync()
            producer.transmit()
        self.deliver_all()
        self.pass_time(0.6)
        self.nothing_accepted_is_lost()
        if self.batch is None:
            self.pull()
        if self.batch is not None:
            self.settle(["t"] * BATCH)
            self.commit()

    def _account(self) -> None:
        held = self.bench.waiting()
        dropped = {record.group_id for record in self.bench.dropped}
        acked = set().union(*(p.acked for p in self.producers))
        ledger = self.bench.pressure().ledger
        assert len(held) == len(set(held))
        assert len(dropped) == len(self.bench.dropped)
        orphans = set().union(*(p.orphans for p in self.producers))
        seen = set(held) | dropped | set(self.trained) | self.filtered
        assert acked <= seen <= acked | orphans
        assert ledger.accepted == len(held) + len(dropped) + len(self.trained) + len(self.filtered)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
