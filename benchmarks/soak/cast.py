"""The cast of an act: its processes, started, killed, stopped and started again.

A player is one process name over all its lives. Each life gets a number and books of its own. An end nobody asked for
is a violation.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.soak import players
from benchmarks.soak.plan import HIGH_BYTES, Act, ProducerPlan, TrainerPlan
from benchmarks.soak.players import ProducerSpec, RankSpec, Spec
from benchmarks.soak.training import read_checkpoint
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.schemas.files import Endpoints
from rolloutmq.services.process.identity import MARKER, marker_of

ROOT: Final = Path(__file__).parents[2]
NUDGE_S: Final = 0.5
"""Time after which a player that was asked to leave is asked again: it may have been starting."""
TAIL_CHARS: Final = 2000
ASKED: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask for something; see `players`."""


class Player:
    """One process name.

    Attributes:
        lives: Number of lives so far.
        expected: Its end was asked for.
    """

    def __init__(self, name: str, role: str, place: "Place", spec: Callable[[int], Spec]) -> None:
        self.name = name
        self.lives = 0
        self.expected = False
        self._role = role
        self._place = place
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._stopped = False

    @property
    def log(self) -> Path:
        return self._place.logs / f"{self.name.replace('/', '-')}.log"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def stopped(self) -> bool:
        return self._stopped

    def start(self) -> None:
        """Begin another life."""
        assert self._process is None
        spec = self._spec(self.lives)
        self.lives += 1
        self.expected, self._asked, self._stopped = False, None, False
        command = [sys.executable, "-m", "benchmarks.soak.players", self._role, str(os.getpid())]
        variables = os.environ | {MARKER: marker_of(self._place.token, self.name.replace("/", "-"))}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, players.encode(spec)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
            )

    def kill(self) -> None:
        """Kill it and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, number: signal.Signals) -> None:
        """Ask for an orderly end with a signal, again and again until it has ended."""
        self.expected, self._asked, self._asked_at = True, number, time.monotonic()
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it lives."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        self._stopped = self.alive
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._stopped = False
        self.signal(signal.SIGCONT)

    def ended(self) -> int | None:
        """Return the exit code of a life that has ended since the last call, or None."""
        if self._process is None:
            return None
        if (code := self._process.poll()) is None:
            if self._asked is not None and time.monotonic() > self._asked_at + NUDGE_S:
                self.ask(self._asked)
            return None
        self._process = None
        return code

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-TAIL_CHARS:] if self.log.exists() else ""


class Place:
    """The directories of an act: the run's own, and those of the soak beside it.

    Attributes:
        listen: Address of the broker, with which all clients come by TCP; empty for unix sockets.
    """

    def __init__(self, root: Path, token: str, listen: str = "") -> None:
        self.token = token
        self.listen = listen
        self.run_dir = root / "run"
        self.producers = root / "producers"
        self.ranks = root / "ranks"
        self.logs = root / "logs"
        self.board = root / "board"
        self._root = root
        for path in (self.run_dir, self.producers, self.ranks, self.logs):
            path.mkdir(parents=True, mode=0o700)

    def checkpoint(self, trainer: str) -> Path:
        return self._root / f"{trainer}.checkpoint"


class Troupe:
    """The ranks of one trainer. They know one incarnation; going back to a checkpoint begins another."""

    def __init__(self, plan: TrainerPlan, first_cell: int, place: Place) -> None:
        self.plan = plan
        self.lone = False
        self.cells = range(first_cell, first_cell + plan.ranks)
        """Its cells of the board."""
        self._place = place
        self._incarnation = 0
        self._resume: tuple[int, int] | None = None
        self._left: set[int] = set()
        """Ranks that have yet to go back to the checkpoint."""
        self.ranks = [
            Player(name, "rank", place, self._spec_of(rank, first_cell + rank))
            for rank, name in enumerate(plan.members)
        ]

    def _spec_of(self, rank: int, cell: int) -> Callable[[int], Spec]:
        def spec(life: int) -> Spec:
            resume = self._resume if rank in self._left else None
            self._left.discard(rank)
            return RankSpec(
                run_dir=self._place.run_dir,
                address=self._place.listen,
                books=self._place.ranks,
                life=life,
                plan=self.plan,
                rank=rank,
                cell=cell,
                board=self._place.board,
                checkpoint=self._place.checkpoint(self.plan.name),
                incarnation=self._incarnation,
                resume=resume,
                lone=self.lone,
            )

        return spec

    def go_back(self) -> None:
        """Let all ranks begin again at the last checkpoint, if there is one; all of them are dead."""
        found = read_checkpoint(self._place.checkpoint(self.plan.name))
        if found is not None:
            self._incarnation += 1
            self._resume = found.incarnation, found.step
            self._left = set(range(self.plan.ranks))


class Cast:
    """All players of an act."""

    def __init__(self, act: Act, place: Place) -> None:
        self._place = place
        self.broker = Player(
            "broker", "broker", place, lambda life: Spec(place.run_dir, place.listen, place.producers, life)
        )
        self.producers = [
            Player(plan.name, "producer", place, self._producer_spec(plan)) for plan in act.producers
        ]
        self.troupes: dict[str, Troupe] = {}
        cell = 0
        for trainer in act.trainers:
            self.troupes[trainer.name] = Troupe(trainer, cell, place)
            cell += trainer.ranks
        self._named = {one.name: one for one in self.everyone()}

    def _producer_spec(self, plan: ProducerPlan) -> Callable[[int], Spec]:
        # An arena is as large as the mark, and a memory file is a file: it cannot be made.
        file_bytes = HIGH_BYTES - 1 if plan.frames else 0
        return lambda life: ProducerSpec(
            self._place.run_dir,
            self._place.listen,
            self._place.producers,
            life,
            plan=plan,
            file_bytes=file_bytes,
        )

    def everyone(self) -> Iterator[Player]:
        """Yield every player, the broker first."""
        yield self.broker
        yield from self.producers
        for troupe in self.troupes.values():
            yield from troupe.ranks

    def victims(self, name: str) -> list[Player]:
        """Return the players a fault names: one, or all ranks of a trainer."""
        return list(self.troupes[name].ranks) if name in self.troupes else [self._named[name]]

    def endpoints(self) -> Endpoints | None:
        """Return the addresses of the broker that lives now; None while it starts."""
        found = read_endpoints(self._place.run_dir)
        return found if found is not None and found.pid == self.broker.pid and self.broker.alive else None

    def kill_all(self) -> None:
        """Kill every player, also stopped ones."""
        for player in self.everyone():
            player.kill()
