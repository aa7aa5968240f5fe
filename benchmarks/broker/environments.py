"""Groups per CPU second of the broker's core with 1,000 environments, against one; durability memory.

The core alone is measured, in this process and by CPU time: sockets, codecs and peers cost the same in both cases. Both
have 1,000 producers that take turns, and groups of the same size, one a message. There are two steady states. In the
first, two groups of each producer stay queued, and a pull is answered at once. In the second the queue is empty, and
the pull waits while the groups of its batch arrive. After each batch the trainer settles, and the core does its
periodic work.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Final

from benchmarks.harness.row import Row, compare
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.envelope import (
    ColumnSpec,
    ColumnTable,
    Dtype,
    Envelope,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.schemas.wire.replies import Batch, Registered
from rolloutmq.schemas.wire.requests import (
    DeclareTables,
    Pull,
    RegisterConsumer,
    RegisterProducer,
    Request,
    Settle,
)
from rolloutmq.services.broker.actions import Action, Reply
from rolloutmq.services.broker.core import BrokerCore

MANY: Final = 1000
PRODUCERS: Final = 1000
BATCH_GROUPS: Final = 64
SEQUENCES: Final = 4
QUEUED: Final = 2 * PRODUCERS
BODY: Final = bytes(1000)
BATCHES: Final = 40
"""Counted batches of a round."""
SETTLES: Final = 10
"""Uncounted batches at the start."""
TURN_GROUPS: Final = 32
"""Groups of one turn of the data plane, after which the core does its periodic work."""
TURN_S: Final = 0.005
"""Time of a turn on the core's clock."""
GOAL: Final = 0.8
TABLE: Final = ColumnTable((ColumnSpec("tokens", Dtype.I32, 1), ColumnSpec("scores", Dtype.F64, 0)))


def rows() -> Iterator[Row]:
    """With a long queue, and with a trainer that waits."""
    for queued, state in ((QUEUED, f"{QUEUED:,} groups queued"), (0, "a trainer that waits")):
        yield compare(
            f"groups/s of CPU in the broker's core, {MANY:,} environments, memory",
            f"batches of {BATCH_GROUPS} groups, {state}",
            partial(rate, MANY, queued),
            partial(rate, 1, queued),
            "1 environment",
            GOAL,
        )


def rate(environments: int, queued: int, batches: int = BATCHES) -> float:
    """Run one round, and return groups per second of CPU."""
    loaded = LoadedCore(environments, queued)
    for _ in range(SETTLES):
        loaded.train()
    started = time.process_time()
    for _ in range(batches):
        loaded.train()
    return batches * BATCH_GROUPS / (time.process_time() - started)


class _Peer:
    """A producer of one environment."""

    def __init__(self, name: str, env: str) -> None:
        self.name, self.env = name, env
        self.session = self.seq = 0

    def envelope(self) -> Envelope:
        """Return the message of its next group."""
        self.seq += 1
        header = GroupHeader(
            seq=self.seq,
            position=self.seq * len(BODY),
            group_id=f"{self.name}/{self.seq}",
            table=TABLE.id,
            frames=1,
            nbytes=len(BODY),
            crc=0,
            sequences=SEQUENCES,
            tokens=SEQUENCES * 10,
            oldest=PolicyVersion(),
            newest=PolicyVersion(),
            started_at=0.0,
            finished_at=0.0,
            rewards=RewardSummary(),
        )
        return Envelope(
            version=1,
            producer=self.name,
            session=self.session,
            run="default",
            env=self.env,
            split=Split.TRAIN,
            groups=(header,),
        )


class LoadedCore:
    """A core with its peers, and a clock of its own."""

    def __init__(self, environments: int, queued: int, *, latencies: bool = True) -> None:
        names = [f"e{number}" for number in range(environments)]
        ageless = {"entry": "bench.py:Bench", "stale": "pass", "group_size": SEQUENCES}
        config = {
            "broker": {"durability": "memory", "retain_bytes": 1},
            "trainer": {"batch_sequences": BATCH_GROUPS * SEQUENCES},
            "environment": dict.fromkeys(names, ageless),
            "telemetry": {"latencies": latencies},
        }
        self._core = BrokerCore(RunConfig.model_validate(config), epoch=1)
        self._now = 100.0
        self._batches: list[Batch] = []
        self._step = 0
        self._request(RegisterConsumer(consumer="c"))
        peers = [_Peer(f"p{number}", names[number % environments]) for number in range(PRODUCERS)]
        for peer in peers:
            self._register(peer)
        self._turns = cycle(peers)
        self._push(queued)
        self._pull()
        self._tick()

    def train(self) -> None:
        """Let the groups of a batch arrive one by one, settle the leased batch, and pull the next one."""
        self._push(BATCH_GROUPS)
        (batch,) = self._batches
        self._batches.clear()
        self._step += 1
        settle = Settle(
            consumer="c",
            lease=batch.lease,
            generation=batch.generation,
            version=PolicyVersion(0, self._step),
            trained=tuple(delivery.header.group_id for delivery in batch.groups),
        )
        self._request(settle)
        self._pull()
        self._tick()

    def _register(self, peer: _Peer) -> None:
        request = RegisterProducer(producer=peer.name, env=peer.env, group_size=SEQUENCES, slots=4)
        (action,) = self._request(request)
        assert isinstance(action, Reply)
        assert isinstance(action.message, Registered)
        peer.session = action.message.ack.session
        self._request(DeclareTables(producer=peer.name, session=peer.session, tables=(TABLE,)))

    def _push(self, groups: int) -> None:
        for number, peer in zip(range(1, groups + 1), self._turns, strict=False):
            self._heard(self._core.ingest(peer.envelope(), [BODY], self._now, self._now))
            if not number % TURN_GROUPS:
                self._tick()

    def _pull(self) -> None:
        pull = Pull(
            consumer="c",
            step=self._step,
            version=PolicyVersion(0, self._step),
            request_id=f"r{self._step}",
            sequences=BATCH_GROUPS * SEQUENCES,
            wait_s=60.0,
        )
        self._request(pull)

    def _tick(self) -> None:
        self._now += TURN_S
        self._heard(self._core.tick(self._now, self._now))

    def _request(self, request: Request) -> list[Action]:
        return self._heard(self._core.request((b"",), request, self._now, self._now))

    def _heard(self, actions: list[Action]) -> list[Action]:
        self._batches += [a.message for a in actions if isinstance(a, Reply) and isinstance(a.message, Batch)]
        return actions
