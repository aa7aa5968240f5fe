"""One act, played: faults at their moments, then a drained queue, then the audit."""

import heapq
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.harness.listening import free_listen
from benchmarks.soak import audit, watch
from benchmarks.soak.audit import Auditor, Books, Promise, Verdict
from benchmarks.soak.board import Board
from benchmarks.soak.books import read_producer, read_rank
from benchmarks.soak.cast import ASKED, Cast, Place, Player, Troupe
from benchmarks.soak.plan import Act, Fault, Kind
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, RunLayout
from rolloutmq.schemas.wire.control import Drain, LedgerCounts, StatusReply
from rolloutmq.services.broker.journal.inspect.explain import group_histories
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify

TICK_S: Final = 0.01
LOOK_S: Final = 1.0
"""Time between two looks at the broker."""
REPORT_S: Final = 5.0
STALL_S: Final = 60.0
"""Time without a settled group after which an act has failed."""
END_S: Final = 180.0
"""Longest time for one part of an orderly end."""
STARTED_S: Final = 60.0
DRAINED_LOOKS: Final = 2
"""Looks in a row at an empty queue."""


@contextmanager
def _ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore signals, and with this process all players that are still starting: they would die of one."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Failed(Exception):  # noqa: N818 - it never leaves this package
    """The act cannot go on; the text is the violation."""


class Tally(msgspec.Struct):
    """What has happened so far in a soak, for its lines."""

    groups: int = 0
    kills: int = 0
    stops: int = 0
    asked: int = 0
    """Drains, leaves and batches given back."""
    lives: int = 0
    again: int = 0
    peak_bytes: int = 0


class Progress:
    """When each trainer last settled a group. One that stands still while another works is stuck, too."""

    def __init__(self, troupes: Mapping[str, Troupe]) -> None:
        self._troupes = troupes
        self._seen: dict[str, tuple[int, float]] = {}

    def stuck(self, board: Board, now: float) -> str:
        """Return the trainer that has settled nothing for too long, or an empty string."""
        for name, troupe in self._troupes.items():
            settled = sum(map(board.settled_by, troupe.cells))
            before, at = self._seen.setdefault(name, (settled, now))
            if settled != before:
                self._seen[name] = settled, now
            elif now > at + STALL_S:
                return f"{name} settled no group for {STALL_S:.0f} s"
        return ""


class Performance:
    """One act in a directory of its own.

    Args:
        act: The plan.
        root: An empty directory.
        tally: Counted on.
        report: Called every few seconds with the settled groups of this act.
    """

    def __init__(self, act: Act, root: Path, tally: Tally, report: Callable[[int, str], None]) -> None:
        self._act = act
        self._tally = tally
        self._report = report
        self.place = Place(
            root, f"soak-{secrets.token_hex(6)}", free_listen() if act.transport == "tcp" else ""
        )
        self._layout = RunLayout(self.place.run_dir)
        self._cast = Cast(act, self.place)
        self._memory = watch.MemoryWatch()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._down: set[str] = set()
        self._pids: set[int] = set()
        self._looked_at = self._reported_at = 0.0
        self._accepted = 0, 0
        """Process of the broker, and the groups it has accepted."""
        self._empty_looks = 0
        self._over = False
        """Producers end for good."""
        self._seen = 0, 0.0
        """Settled groups, and since when."""
        self._last: StatusReply | None = None
        self.violations: list[str] = []

    def play(self) -> list[str]:
        """Play the act to its end; return the violations."""
        write_json(self._layout.config, self._act.config(self.place.listen))
        with _ignored(*ASKED), Board(self.place.board) as board:
            self._board = board
            try:
                self._begin()
                self._disturb()
                self._finish()
            except Failed as failure:
                self.violations.append(str(failure))
            finally:
                for player in self._cast.everyone():
                    player.go_on()
                self._cast.kill_all()
                self._tally.lives += sum(player.lives for player in self._cast.everyone())
                self._tally.peak_bytes = max(self._tally.peak_bytes, self._memory.peak)
                self._tally.groups += board.total
        return self.violations

    def _begin(self) -> None:
        self._start(self._cast.broker)
        self._wait(lambda: self._cast.endpoints() is not None, STARTED_S, "the broker to start")
        for player in self._cast.everyone():
            if not player.alive:
                self._start(player)

    def _start(self, player: Player) -> None:
        player.start()
        self._pids.add(player.pid)

    def _disturb(self) -> None:
        """Let everybody work, and the faults happen, until the act has its groups."""
        faults, progress = list(self._act.faults), Progress(self._cast.troupes)
        while faults or self._board.total < self._act.groups:
            total = self._board.total
            if stuck := progress.stuck(self._board, time.monotonic()):
                raise Failed(self._stalled(stuck))
            while faults and faults[0].at <= total:
                self._inflict(faults.pop(0))
            self._tick()
        self._wait(lambda: not self._due, END_S, "the last fault to end")

    def _tick(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        for player in self._cast.everyone():
            self._reap(player)
        if now > self._looked_at + LOOK_S:
            self._looked_at = now
            self._look()
        if now > self._reported_at + REPORT_S:
            self._reported_at = now
            self._report(self._board.total, self._wait_reasons())
        time.sleep(TICK_S)

    def _reap(self, player: Player) -> None:
        code = player.ended()
        if code is None:
            return
        if code or not player.expected:
            raise Failed(f"{player.name} ended by itself with exit code {code}: {player.tail()}")
        if not self._board.leave:
            self._begin_again(player)

    def _begin_again(self, player: Player) -> None:
        if not player.alive and player.name not in self._down and not self._ending(player):
            self._start(player)

    def _ending(self, player: Player) -> bool:
        return self._over and player in self._cast.producers

    # Faults.

    def _inflict(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                self._tally.kills += 1
                self._kill(fault)
            case Kind.STOP:
                self._tally.stops += 1
                self._stop(fault)
            case Kind.DRAIN:
                self._tally.asked += 1
                self._drain(fault.victim)
            case Kind.LEAVE:
                self._tally.asked += 1
                self._let_leave(fault.victim)

    def _kill(self, fault: Fault) -> None:
        if fault.victim == "broker" and self._act.durability == "memory":
            self._end_broker()
            return
        victims = self._cast.victims(fault.victim)
        for player in victims:
            self._down.add(player.name)
            player.kill()
        troupe = self._cast.troupes.get(fault.victim.partition("/")[0])
        if troupe is not None and len(victims) == troupe.plan.ranks:
            troupe.go_back()

        def again() -> None:
            for player in victims:
                self._down.discard(player.name)
                self._begin_again(player)

        self._later(fault.lasts_s, again)

    def _end_broker(self) -> None:
        """End the broker in order and start another life: at durability `memory` it promises no more."""
        broker = self._cast.broker
        if broker.alive and not broker.expected:
            broker.go_on()
            self._wait(lambda: self._cast.endpoints() is not None, STARTED_S, "the broker to start")
            broker.expected = True
            broker.signal(signal.SIGTERM)

    def _stop(self, fault: Fault) -> None:
        victims = [player for player in self._cast.victims(fault.victim) if player.alive]
        for player in victims:
            player.stop()

        def go_on() -> None:
            for player in victims:
                player.go_on()

        self._later(fault.lasts_s, go_on)

    def _drain(self, producer: str) -> None:
        (player,) = self._cast.victims(producer)
        endpoints = self._cast.endpoints()
        if endpoints is None or self._cast.broker.stopped or not player.alive:
            return
        with BlockingClient(endpoints.serve) as client:
            try:
                client.request(Drain(worker=producer), watch.STATUS_S, watch.STATUS_S)
            except RolloutMQError:
                return  # it has not registered yet, or the broker is busy
        player.expected = True

    def _let_leave(self, name: str) -> None:
        for player in self._cast.victims(name):
            if player in self._cast.producers:
                player.ask(signal.SIGUSR1)
            else:
                player.signal(signal.SIGUSR1)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, len(self._due) + self._tally.kills << 8, act))

    # Looking.

    def _look(self) -> None:
        """Ask the broker for its status, if it can answer, and check it."""
        endpoints = self._cast.endpoints()
        if endpoints is None or self._cast.broker.stopped:
            return
        found = watch.status(endpoints)
        if found is None:
            return
        self._last = found
        self._note(watch.broken(found))
        counts = found.pressure.ledger
        pid, accepted = self._accepted
        # A killed broker may have counted groups that were not durable yet: no producer was told, and sends them again.
        if pid == endpoints.pid and counts.accepted < accepted:
            self._note([f"status: accepted fell from {accepted} to {counts.accepted}"])
        self._accepted = endpoints.pid, counts.accepted
        self._empty_looks = 0 if counts.queued + counts.leased else self._empty_looks + 1
        kept = counts.queued + counts.leased + counts.trained + counts.filtered
        self._note(filter(None, [self._memory.look(endpoints.pid, kept)]))

    def _note(self, found: Iterable[str]) -> None:
        for line in found:
            if line not in self.violations and len(self.violations) < audit.SHOWN:
                self.violations.append(line)

    def _wait_reasons(self) -> str:
        if self._last is None:
            return "no status"
        lanes = ", ".join(f"{lane.env} {lane.wait}" for lane in self._last.pressure.lanes if lane.wait)
        return f"trainer {self._last.pressure.trainer_wait or 'busy'}, {lanes or 'no producer waits'}"

    def _stalled(self, who: str) -> str:
        self._look()
        counts = self._last.pressure.ledger if self._last is not None else LedgerCounts()
        logs = "\n".join(f"--- {player.name}\n{player.tail()[-600:]}" for player in self._cast.everyone())
        return (
            f"stalled: {who}; {counts.queued} queued, {counts.leased} leased; {self._wait_reasons()}\n{logs}"
        )

    def _wait(self, met: Callable[[], bool], limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        while not met():
            if time.monotonic() > until:
                raise Failed(self._stalled(f"waited {limit_s:.0f} s for {what}"))
            self._tick()

    # The end.

    def _finish(self) -> None:
        """End the producers, drain the queue, end everybody in order, and audit."""
        self._over = True
        for player in self._cast.producers:
            self._wait(lambda player=player: player.alive, STARTED_S, f"{player.name} to start")  # type: ignore[misc]
        for player in self._cast.producers:
            player.ask(signal.SIGUSR2)
        self._wait(lambda: not any(p.alive for p in self._cast.producers), END_S, "the producers to end")
        counts = self._drained()
        counts = self._restarted(counts)
        self._end_in_order()
        verdict = self._audited(counts)
        self.violations += verdict.lines()
        self._tally.again += verdict.again
        self.violations += watch.leftovers(self.place.run_dir, self.place.token, self._pids)

    def _drained(self) -> LedgerCounts:
        """Let the trainers empty the queue; what is less than a batch goes group by group, to one rank each."""
        self._wait(self._starving, END_S, "the trainers to want more than is queued")
        self._board.leave = True
        ranks = [player for troupe in self._cast.troupes.values() for player in troupe.ranks]
        for player in ranks:
            player.expected = True
        self._wait(lambda: not any(player.alive for player in ranks), END_S, "the trainers to end")
        self._board.leave = False
        for troupe in self._cast.troupes.values():
            troupe.lone = True
            self._start(troupe.ranks[0])
        self._empty_looks = 0
        self._wait(lambda: self._empty_looks >= DRAINED_LOOKS, END_S, "the queue to be drained")
        self._board.leave = True
        for troupe in self._cast.troupes.values():
            troupe.ranks[0].expected = True
        self._wait(lambda: not any(player.alive for player in ranks), END_S, "the trainers to end")
        return self._counts()

    def _starving(self) -> bool:
        """Whether nothing has been settled for a while: each trainer waits for more than is left."""
        total = self._board.total
        if total != self._seen[0]:
            self._seen = total, time.monotonic()
        return time.monotonic() > self._seen[1] + 1.0

    def _counts(self) -> LedgerCounts:
        endpoints = self._cast.endpoints()
        found = watch.status(endpoints) if endpoints is not None else None
        if found is None:
            raise Failed("the broker gave no status at the end")
        return found.pressure.ledger

    def _restarted(self, counts: LedgerCounts) -> LedgerCounts:
        """Kill the broker once more: another life has the same ledger."""
        if self._act.durability != "memory":
            self._cast.broker.kill()
            self._start(self._cast.broker)
            self._wait(lambda: self._cast.endpoints() is not None, STARTED_S, "the broker to start")
            if (after := self._counts()) != counts:
                self._note([f"counts: the ledger was {counts} before the last restart, and is {after}"])
        return counts

    def _end_in_order(self) -> None:
        broker = self._cast.broker
        broker.expected = True
        broker.signal(signal.SIGTERM)
        self._wait(lambda: not broker.alive, END_S, "the broker to end")

    def _audited(self, counts: LedgerCounts) -> Verdict:
        act = self._act
        recorded = act.durability != "memory"
        auditor = Auditor(
            self._books(), Promise(act.may_expire, act.may_die), self._history if recorded else None
        )
        verdict = auditor.audit()
        audit.compare(verdict, counts)
        if recorded:
            self._verify(verdict, counts)
        return verdict

    def _books(self) -> Books:
        ranks = sorted(self.place.ranks.iterdir(), key=lambda path: int(path.name.rpartition(".")[2]))
        return Books(
            producers=[read_producer(path) for path in self.place.producers.iterdir()],
            ranks=audit.by_rank(
                (path.name.split(".")[0], int(path.name.split(".")[1]), read_rank(path)) for path in ranks
            ),
            splits={one.name: one.split for one in self._act.producers}
            | {one.name: one.split for one in self._act.trainers},
            dropped=[
                msgspec.json.decode(line, type=DroppedGroup)
                for line in self._layout.dropped.read_bytes().splitlines()
                if line.endswith(b"}")
            ],
        )

    def _history(self, group_id: str) -> tuple[str, str, str]:
        found = group_histories(self._layout.journal, group_id)
        if not found:
            return "", "", "the journal does not know it"
        last = found[-1]
        reason = next(
            (str(e.details.get("reason")) for e in reversed(last.moments) if "reason" in e.details), ""
        )
        events = "; ".join(f"{entry.event} {entry.details}" for entry in last.moments)
        return last.state, reason, f"in the journal it is {last.state}: {events}"

    def _verify(self, verdict: Verdict, counts: LedgerCounts) -> None:
        """Hold the product's own audit of its files against the ledger of its last life."""
        acked = [
            msgspec.json.decode(line, type=AckedGroup)
            for path in self._layout.acks.glob("*.jsonl")
            for line in path.read_bytes().split(b"\n")[:-1]
        ]
        found = verify(
            self._layout.journal, self._layout.dead, lambda: Witness(acked, (audit.trained(verdict),))
        )
        for problem in found.problems:
            verdict.blame("ledger verify", str(problem))
        theirs = {name: getattr(counts, name) for name in ("accepted", "rewound")}
        mine = {"accepted": found.accepted, "rewound": found.rewound}
        states = ("queued", "leased", "trained", "committed", "filtered", "expired", "dead", "discarded")
        theirs |= {name: getattr(counts, name) for name in states}
        mine |= {name: found.counts.get(name, 0) for name in states}
        if mine != theirs:
            verdict.blame("ledger verify", f"{mine} in the files, {theirs} in the status")
