"""Requests about tasks: from the trainer that submits them and the workers that take them.

Two kinds of requests wait: a take until there is a task, and an await until enough of its tasks have ended. Each is
answered once; a repetition replaces the waiting one and keeps its deadline. Beyond the limits below, a request is
answered at once instead of waiting.
"""

import math
from typing import Final

import msgspec

from rolloutmq.schemas.wire.envelope import ErrorCode, Split
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.schemas.wire.tasks import (
    AwaitTasks,
    CancelTasks,
    HandBack,
    NewTask,
    SubmitTasks,
    TakenTask,
    TakenTasks,
    TakeTasks,
    TasksFull,
    TaskStates,
)
from rolloutmq.services.broker.actions import Route
from rolloutmq.services.broker.broker_state import BrokerState, refuse
from rolloutmq.services.broker.flow.sessions import ProducerSession
from rolloutmq.services.broker.requests.producers import ProducerRequests
from rolloutmq.services.broker.state.rates import Rate
from rolloutmq.services.broker.state.tasks import Line, StoredTask, digest_of

TASK_TICK_S: Final = 0.05
"""How often deadlines and waits are examined."""
TAKERS_LIMIT: Final = 1 << 16
"""Most remembered takers, so a repeated request gets the same tasks."""
ASKS_LIMIT: Final = 1 << 12
"""Awaits that wait at once."""
TAKEN_BYTES: Final = 4 << 20
"""Most payload bytes in one reply; the first task goes at any size."""
RETRY_S: Final = (0.1, 60.0)
"""Bounds of the retry time in a refused submission."""
STUCK_S: Final = 5.0
"""Retry time where no task has ended lately."""


class _Take(msgspec.Struct, eq=False):
    route: Route
    request: TakeTasks
    deadline: float


class _Ask(msgspec.Struct, eq=False):
    request: AwaitTasks
    missing: set[str]
    deadline: float

    @property
    def answered(self) -> bool:
        named = set(self.request.ids)
        return len(named) - len(self.missing) >= (self.request.enough or len(named)) or not self.missing


class TaskRequests:
    """Handles requests about tasks."""

    def __init__(self, state: BrokerState, producers: ProducerRequests) -> None:
        self._state = state
        self._producers = producers
        self._takes: dict[Line, dict[tuple[int, int], _Take]] = {}
        self._answered: dict[int, dict[int, int]] = {}
        """Number of the last answered request, by session and slot."""
        self._asks: dict[Route, _Ask] = {}
        self._ended = Rate()
        self._due = 0.0

    # Requests of the trainer.

    def submit(self, request: SubmitTasks, now: float, wall: float) -> TaskStates | TasksFull | ErrorReply:
        """Queue all new tasks of a request, or none."""
        state = self._state
        if not state.run.serves(request.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {state.run.name}")
        fresh: dict[str, NewTask] = {}
        for new in request.tasks:
            if (error := self._unacceptable(new, fresh)) is not None:
                return error
            if state.tasks.find(new.id) is None:
                fresh[new.id] = new
        if (full := self._full(list(fresh.values()), now)) is not None:
            return full
        for new in fresh.values():
            state.tasks.submit(new, now, wall)
        self.serve(now)
        return self._states(tuple(new.id for new in request.tasks))

    def _unacceptable(self, new: NewTask, fresh: dict[str, NewTask]) -> ErrorReply | None:
        state = self._state
        if math.isnan(new.deadline_s):
            return refuse(
                ErrorCode.INVALID, f"task {new.id}: deadline_s must be a number (got {new.deadline_s})"
            )
        known = state.tasks.find(new.id)
        other = fresh.get(new.id)
        if (known is not None and known.digest != digest_of(new)) or (other is not None and other != new):
            return refuse(ErrorCode.CONFLICT, f"task {new.id} was submitted before with other content")
        if known is not None:
            return None
        lane = state.lanes.find(new.env, new.split)
        section = state.config.environment.get(new.env)
        if lane is None and section is None and state.config.environment:
            return refuse(ErrorCode.UNKNOWN, f"task {new.id}: there is no environment {new.env}")
        evaluates = new.split is Split.EVAL and new.env in state.config.evaluated
        if lane is None and section is not None and section.split != new.split.name.lower() and not evaluates:
            return refuse(
                ErrorCode.INVALID, f"task {new.id}: environment {new.env} is of split {section.split}"
            )
        batch = state.run.batch_sequences
        if new.split == 0 and new.size > batch:
            return refuse(
                ErrorCode.INVALID,
                f"task {new.id}: size must be at most a batch, {batch} sequences (got {new.size})",
            )
        return None

    def _full(self, fresh: list[NewTask], now: float) -> TasksFull | None:
        tasks, broker = self._state.tasks, self._state.config.broker
        over = len(tasks) + len(fresh) - broker.max_tasks
        nbytes = tasks.nbytes + sum(len(new.payload) for new in fresh)
        if not fresh or (over <= 0 and nbytes <= broker.task_bytes):
            return None
        rate = self._ended.per_s(now)
        least, most = RETRY_S
        retry_s = min(most, max(least, max(1, over) / rate)) if rate else STUCK_S
        detail = (
            f"{len(tasks)} tasks with {tasks.nbytes} bytes are open; {len(fresh)} more would exceed "
            f"broker.max_tasks {broker.max_tasks} or broker.task_bytes {broker.task_bytes}"
        )
        return TasksFull(detail=detail, retry_s=retry_s)

    def cancel(self, request: CancelTasks, now: float) -> TaskStates:
        """Cancel the named tasks that are open."""
        for name in request.ids:
            self._state.tasks.cancel(name, request.reason)
        self.serve(now)
        return self._states(request.ids)

    def ask(self, route: Route, request: AwaitTasks, now: float) -> None:
        """Report the states of tasks, now or when enough of them have ended."""
        tasks = self._state.tasks
        missing = {name for name in request.ids if not tasks.status(name).over}
        ask = _Ask(request, missing, now + request.wait_s)
        if (previous := self._asks.get(route)) is not None and previous.request == request:
            ask.deadline = min(ask.deadline, previous.deadline)
        waits = request.wait_s > 0 and not math.isnan(request.wait_s)
        if ask.answered or not waits or (len(self._asks) >= ASKS_LIMIT and route not in self._asks):
            self._asks.pop(route, None)
            self._report(route, ask)
        else:
            self._asks[route] = ask

    def _report(self, route: Route, ask: _Ask) -> None:
        self._state.outbox.reply(route, self._states(ask.request.ids), durable=True)

    def _states(self, ids: tuple[str, ...]) -> TaskStates:
        return TaskStates(tasks=tuple(map(self._state.tasks.status, ids)))

    # Requests of workers.

    def take(self, route: Route, request: TakeTasks, now: float) -> None:
        """Hand out tasks, now or when there are some; a repeated request gets the same tasks."""
        session = self._producers.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            self._state.outbox.reply(route, session)
            return
        if math.isnan(request.wait_s) or math.isnan(request.lease_s):
            self._state.outbox.reply(
                route,
                refuse(
                    ErrorCode.INVALID,
                    f"wait_s and lease_s: must be numbers (got {request.wait_s} and {request.lease_s})",
                ),
            )
            return
        key = session.number, request.slot
        line = session.lane.env, session.lane.split
        previous = self._pop(line, key)
        if previous is not None and previous.route != route:
            self._state.outbox.reply(previous.route, TakenTasks())
        held = self._state.tasks.held(session.number, request.slot, request.number)
        answered = self._answered.get(session.number, {}).get(request.slot, 0)
        if held or request.number <= answered or request.count == 0 or session.draining:
            self._hand_out(route, request, session, held, now)
        elif not answered and sum(map(len, self._answered.values())) >= TAKERS_LIMIT:
            self._state.outbox.reply(
                route, refuse(ErrorCode.LIMIT, f"take: {TAKERS_LIMIT} takers are known, the limit")
            )
        else:
            take = _Take(route, request, now + request.wait_s)
            if previous is not None and previous.request.number == request.number:
                take.deadline = min(take.deadline, previous.deadline)
            if not self._taken(take, session, now):
                self._wait(key, line, take, session, now)

    def _wait(
        self, key: tuple[int, int], line: Line, take: _Take, session: ProducerSession, now: float
    ) -> None:
        waiting = self._takes.setdefault(line, {})
        if take.request.wait_s > 0 and len(waiting) < TAKERS_LIMIT:
            waiting[key] = take
            session.takes += 1
        else:
            self._hand_out(take.route, take.request, session, [], now)

    def _pop(self, line: Line, key: tuple[int, int]) -> _Take | None:
        """Remove a waiting take."""
        take = self._takes.get(line, {}).pop(key, None)
        session = self._state.sessions.numbered(key[0])
        if take is not None and session is not None:
            session.takes -= 1
        return take

    def _taken(self, take: _Take, session: ProducerSession, now: float) -> bool:
        """Hand out tasks, if there are some."""
        line, asked = (session.lane.env, session.lane.split), take.request
        found: list[StoredTask] = []
        nbytes = 0
        while len(found) < asked.count and nbytes < TAKEN_BYTES:
            task = self._state.tasks.take(
                line,
                session.producer,
                session.number,
                asked.slot,
                asked.number,
                lease_s=asked.lease_s,
                now=now,
            )
            if task is None:
                break
            found.append(task)
            nbytes += task.nbytes
        if found:
            self._hand_out(take.route, asked, session, found, now)
        return bool(found)

    def _hand_out(
        self, route: Route, request: TakeTasks, session: ProducerSession, tasks: list[StoredTask], now: float
    ) -> None:
        numbers = self._answered.setdefault(session.number, {})
        numbers[request.slot] = max(numbers.get(request.slot, 0), request.number)
        taken = TakenTasks(tasks=tuple(_as_taken(task, now) for task in tasks))
        self._state.outbox.reply(route, taken, durable=bool(tasks))

    def hand_back(self, request: HandBack, now: float) -> Ok | ErrorReply:
        """Return a task to its queue; a task the session does not hold is left as it is."""
        session = self._producers.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            return session
        task = self._state.tasks.holds(request.id, session.number)
        if task is not None:
            reason = (
                f"{session.producer}: {request.reason}"
                if request.reason
                else f"{session.producer} returned it"
            )
            self._state.tasks.give_back(task, reason, tried=request.tried)
            self.serve(now)
        return Ok()

    def left(self, session: ProducerSession, why: str, now: float) -> None:
        """Return the tasks of a session that has ended."""
        line = session.lane.env, session.lane.split
        for key in [key for key in self._takes.get(line, {}) if key[0] == session.number]:
            if (take := self._pop(line, key)) is not None:
                self._state.outbox.reply(take.route, TakenTasks())
        self._forget(session.number, why)
        self.serve(now)

    def _forget(self, session: int, why: str) -> None:
        self._answered.pop(session, None)
        self._state.tasks.left(session, why)

    # Accepted groups and deadlines.

    def serve(self, now: float) -> None:
        """Answer all waiting requests a change allows."""
        tasks = self._state.tasks
        if not tasks.returned and not tasks.ended:
            return
        lines, tasks.returned = tasks.returned, set()
        for line in lines:
            self._serve_line(line, now)
        ended, tasks.ended = tasks.ended, []
        if not ended:
            return
        self._ended.add(len(ended), now)
        for route, ask in list(self._asks.items()):
            ask.missing.difference_update(ended)
            if ask.answered:
                del self._asks[route]
                self._report(route, ask)

    def _serve_line(self, line: Line, now: float) -> None:
        waiting = self._takes.get(line, {})
        while waiting and self._state.tasks.queued(line):
            key = next(iter(waiting))
            take = self._pop(line, key)
            session = self._state.sessions.numbered(key[0])
            if take is None:
                continue
            if session is None or session.draining or not self._taken(take, session, now):
                self._state.outbox.reply(take.route, TakenTasks())

    def tick(self, now: float) -> None:
        """End tasks past their deadlines, and answer requests that waited long enough."""
        if now < self._due:
            return
        self._due = now + TASK_TICK_S
        self._state.tasks.expire(now)
        self.serve(now)
        for line, waiting in list(self._takes.items()):
            for key in [key for key, take in waiting.items() if take.deadline <= now]:
                due = self._pop(line, key)
                session = self._state.sessions.numbered(key[0])
                if due is not None and session is not None:
                    self._hand_out(due.route, due.request, session, [], now)
            if not waiting:
                del self._takes[line]
        for route, ask in list(self._asks.items()):
            if ask.deadline <= now:
                del self._asks[route]
                self._report(route, ask)

    def sweep(self, now: float) -> None:
        """Return tasks held by sessions that have ended, or held for too long."""
        sessions, moment = self._state.sessions, now - self._state.config.broker.silence_s
        for number in {*self._state.tasks.holders(), *self._answered}:
            session = sessions.numbered(number)
            if session is None or session.closed or sessions.current(session.producer) is not session:
                self._forget(number, "has ended")
            elif session.heard_at <= moment:
                self.left(session, "fell silent", now)
        self._state.tasks.end_leases(now)
        self.serve(now)

    def reset(self) -> None:
        """Forget all waiting requests: the run was reset, and its sessions with it."""
        for waiting in self._takes.values():
            for take in waiting.values():
                self._state.outbox.reply(take.route, TakenTasks())
        self._takes.clear()
        self._answered.clear()


def _as_taken(task: StoredTask, now: float) -> TakenTask:
    left = max(TASK_TICK_S, task.deadline_at - now) if task.deadline_at < math.inf else 0.0
    about = task.submitted
    return TakenTask(
        id=task.id,
        payload=about.payload,
        size=about.size,
        left_s=left,
        deliveries=task.deliveries,
        index=about.index,
        greedy=about.greedy,
    )
