"""A cluster of hosts that are played: what the service asks is recorded, and tests say what the hosts answer."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from rolloutmq.services.orchestrator.cluster.backend import Answer
from rolloutmq.services.orchestrator.cluster.messages import HostOrder, HostState, LifeState, Node
from rolloutmq.services.orchestrator.cluster.resources import Need


class FakeCluster:
    """A backend whose hosts live in this process: an order gets one while `places` is set."""

    def __init__(self) -> None:
        self.places = True
        self.answers_kill = True
        self.silent = False
        """No host answers."""
        self.orders: dict[str, HostOrder] = {}
        self.needs: dict[str, Need] = {}
        self.states: dict[str, LifeState] = {}
        self.output: dict[str, bytes] = {}
        self.signals: list[tuple[str, int, bool]] = []
        self.removed: list[str] = []
        self.of_cluster = [Node(id=f"node-{number}", host="h", total={"CPU": 2.0}) for number in (7, 8)]
        self.on: defaultdict[str, str] = defaultdict(lambda: "node-7")
        """Node of a life."""
        self.avoided: dict[str, tuple[str, ...]] = {}
        self.requests: list[tuple[dict[str, int], tuple[str, ...]]] = []
        self.lost: deque[str] = deque()
        self.questions: Counter[str] = Counter()
        """Number of questions, by life."""
        self._asked: dict[str, int] = {}
        self._told: dict[str, HostState] = {}
        self.pids: Iterator[int] = iter(range(1000, 10_000))

    def found(self) -> list[tuple[str, str]]:
        return [(life, order.name) for life, order in self.orders.items()]

    def start(self, order: HostOrder, need: Need, avoid: Sequence[str] = ()) -> None:
        assert order.life not in self.orders, "a life began twice"
        self.avoided[order.life] = tuple(avoid)
        self.orders[order.life], self.needs[order.life] = order, need
        if self.places:
            self.place(order.life)

    def place(self, life: str) -> None:
        """Find a host for a life."""
        name = self.orders[life].name
        self.states[life] = LifeState(
            life=life, name=name, host="node-7", pid=next(self.pids), start_ticks=5, boot_id="boot"
        )

    def end(self, life: str, code: int) -> None:
        """Let the process of a life end."""
        self.states[life] = replace(self.states[life], over=True, code=code)

    def life_of(self, name: str) -> str:
        """Return the newest life of a process, empty if it has none."""
        return next((life for life, order in reversed(list(self.orders.items())) if order.name == name), "")

    def disconnect(self) -> None:
        """Lose the questions, as at the death of the process that asked."""
        self._asked.clear()
        self._told.clear()

    def look(self, life: str, acked: int) -> None:
        assert life not in self._asked, "asked twice at once"
        self.questions[life] += 1
        self._asked[life] = acked

    def poll(self, timeout_s: float) -> list[Answer]:
        until = time.monotonic() + timeout_s
        while not (found := self._answers()) and time.monotonic() < until:
            time.sleep(0.005)
        return found

    def _answers(self) -> list[Answer]:
        found: list[Answer] = []
        if self.silent:
            return found
        for life, acked in list(self._asked.items()):
            if life in self.lost:
                self.lost.remove(life)
                found.append(Answer(life, error="lost with its host"))
            elif life in self.states:
                told = self.output.get(life, b"")[max(0, acked) :]
                answer = HostState(state=self.states[life], offset=max(0, acked), output=told)
                if self._told.get(life) == answer and not answer.state.over:
                    continue
                self._told[life] = answer
                found.append(Answer(life, answer))
            else:
                continue
            del self._asked[life]
        return found

    def send(self, life: str, number: int, group: bool) -> None:
        self.signals.append((self.orders[life].name, number, group))
        if number == 9 and self.answers_kill:
            self.end(life, -9)

    def kill(self, life: str) -> None:
        self.removed.append(life)
        for known in (self.orders, self.states, self._asked):
            known.pop(life, None)

    def kill_all(self, lives: Collection[str]) -> None:
        for life in list(lives):
            self.kill(life)

    def placed(self, lives: Collection[str]) -> dict[str, str]:
        return {life: self.on[life] for life in lives if life in self.states}

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.of_cluster)

    def request(self, needs: Mapping[Need, int], avoid: Sequence[str] = ()) -> None:
        self.requests.append(({str(need): count for need, count in needs.items()}, tuple(avoid)))

    def close(self) -> None:
        """Nothing to end."""
