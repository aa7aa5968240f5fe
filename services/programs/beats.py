"""Heartbeats of programs, sent by the gateway in their place, and the way of a drain to a program.

The files of the orchestrator tell which programs run and which it is ending; an operator's drain comes in the reply to
a heartbeat. Files and heartbeats are repeated state: nothing is lost with a message, a gateway or a broker.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerBeatReply, WorkerState
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.services.process.identity import alive
from rolloutmq.services.programs.life import ProgramLife, ProgramTable

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""Interval of the heartbeats, as of our own workers."""
ANSWER_S: Final = 3.0
STOPPING: Final = "stopping"
"""Phase of a worker that the orchestrator is ending."""
HOLD_S: Final = 0.5
"""Longest sleep of a held request: a post may have ended meanwhile."""

Ask = Callable[[WorkerBeat, float], Awaitable[Reply]]
"""Sends a request to the broker with a timeout in seconds; raises RolloutMQError."""
Leave = Callable[[str], Awaitable[None]]
"""Called with a worker that has delivered everything, or ended."""


class Programs:
    """The programs of one run, as the gateway knows them. Belongs to one event loop; `run` runs it.

    Args:
        layout: Run directory.
        environments: Environments with a command, by name.
        ask: Sends a heartbeat.
        leave: Releases the claims of a worker.
        registered: Workers that registered with an earlier gateway: those still running may have rollouts in progress.
    """

    def __init__(
        self,
        layout: RunLayout,
        environments: Mapping[str, EnvironmentConfig],
        ask: Ask,
        leave: Leave,
        registered: Collection[str] = (),
    ) -> None:
        self.table = ProgramTable(environments)
        self._layout = layout
        self._ask = ask
        self._leave = leave
        self._host = socket.gethostname()
        self._registered = registered
        self._left: set[ProgramLife] = set()
        self._over: list[ProgramLife] = []
        self._hosts: dict[str, str] = {}
        """Host of each program on another one."""

    def find(self, worker: str) -> ProgramLife | None:
        """Return the life of a worker, also of one just started; None if no such process runs."""
        life = self.table.get(worker)
        if life is None and self.table.env_of(worker) is not None:
            self._look()
            life = self.table.get(worker)
        return life

    async def hold(self, worker: str, gone: asyncio.Event) -> ProgramLife | None:
        """Wait while a worker drains and has not delivered everything, or until its client is gone; return its life."""
        while (life := self.table.get(worker)) is not None and life.draining and not gone.is_set():
            left_s = life.delivers_for_s(time.monotonic())
            if not left_s:
                break
            await asyncio.sleep(min(left_s, HOLD_S))
        return life

    async def run(self) -> None:
        """Send heartbeats until cancelled; return at once if the run has no programs."""
        while self.table:
            self._look()
            lives, over, self._over = self.table.lives(), self._over, []
            await asyncio.gather(*(self._end(life) for life in over), *(self._beat(life) for life in lives))
            await asyncio.sleep(BEAT_S)

    def _look(self) -> None:
        """Read the orchestrator's files."""
        now = time.monotonic()
        try:
            identities = read_json(self._layout.workers, list[ProcessIdentity]) or []
            records = read_json(self._layout.supervision, Supervision)
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("state of the workers unreadable error=%s", error)
            return
        found = [one for one in identities if self.table.env_of(one.name) and _runs(one)]
        self._hosts |= {one.name: one.host for one in found if one.host}
        running = {one.name: one.pid for one in found}
        self._over += self.table.see(running, now)
        for life in self.table.lives():
            life.spoke = life.spoke or life.worker in self._registered
        self._registered = ()
        for record in records.workers if records is not None else ():
            ending = self.table.get(record.worker)
            if ending is not None and record.phase == STOPPING and record.pid == ending.pid:
                self._drain(ending, record.reason)

    async def _beat(self, life: ProgramLife) -> None:
        beat = self._beat_of(life)
        if beat.state is WorkerState.GONE and life not in self._left:
            self._left.add(life)
            logger.info("program delivered everything worker=%s produced=%d", life.worker, life.produced)
            await self._leave(life.worker)
        reply = await self._told(beat)
        if isinstance(reply, WorkerBeatReply) and reply.draining:
            self._drain(life, "an operator asked")

    async def _end(self, life: ProgramLife) -> None:
        """Report the end of a process: no other heartbeat would."""
        self._left.discard(life)
        if self.table.get(life.worker) is None:
            await self._leave(life.worker)
            last = msgspec.structs.replace(self._beat_of(life), state=WorkerState.GONE)
            await self._told(last)

    def _beat_of(self, life: ProgramLife) -> WorkerBeat:
        return life.beat(self._hosts.get(life.worker, self._host), time.monotonic())

    async def _told(self, beat: WorkerBeat) -> Reply | None:
        try:
            return await self._ask(beat, ANSWER_S)
        except RolloutMQError as error:
            logger.info("heartbeat unanswered worker=%s error=%s", beat.worker, error)
            return None

    def _drain(self, life: ProgramLife, reason: str) -> None:
        if not life.draining:
            logger.info("draining worker=%s reason=%s", life.worker, reason)
            life.drain(time.monotonic())


def _runs(identity: ProcessIdentity) -> bool:
    """Return whether a program runs; of one on another host, whether the orchestrator counts it as running."""
    return identity.pid > 0 if identity.life else alive(identity)
