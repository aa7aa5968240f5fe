"""The lives of a run's processes on a cluster: what was ordered, what their hosts tell, and when one is given up. Pure.

A life is asked for its state from its order to its end. Its first answer says that a host was found; without one it is
given up after `placement_timeout_s`, because a cluster lets a request that never fits wait for ever. The loss of its
host ends a life; so does a kill after which its host does not answer.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from rolloutmq.services.orchestrator.cluster.messages import HostState, LifeState, Lives, cut

KILL_S: Final = 5.0
"""Time after SIGKILL without an answer of its host, at which a process counts as ended: the host is cut off."""
SIGKILL: Final = 9


@dataclass(slots=True)
class Life:
    """One life.

    Attributes:
        state: As reported last.
        env: Environment of the process.
        since: Time of its order.
        acked: Position of its output up to which it was written; -1: unknown, as after a restart of the service.
        answered: Its host answered.
        killed_at: Time of SIGKILL; infinite before.
        heard_at: Time of the last answer of its host.
    """

    state: LifeState
    env: str
    since: float
    acked: int = 0
    answered: bool = False
    killed_at: float = math.inf
    heard_at: float = -math.inf

    @property
    def is_hostless(self) -> bool:
        """Whether it has no host yet; one that an earlier service ordered has had the time to get one."""
        return not self.answered and self.acked >= 0


class LifeBook:
    """All lives of a run.

    Args:
        placement_timeout_s: Longest wait of a life for its host's first answer.
    """

    def __init__(self, placement_timeout_s: float) -> None:
        self._timeout_s = placement_timeout_s
        self._lives: dict[str, Life] = {}

    def __contains__(self, life: str) -> bool:
        """Return whether a life is known."""
        return life in self._lives

    def get(self, life: str) -> Life | None:
        """Return a life, None if it is unknown."""
        return self._lives.get(life)

    def living(self) -> list[str]:
        """Return the lives that are not over."""
        return [life for life, one in self._lives.items() if not one.state.over]

    def report(self) -> Lives:
        """Return the states of all lives."""
        return Lives(lives=tuple(one.state for one in self._lives.values()))

    def begin(self, life: str, name: str, env: str, now: float) -> LifeState:
        """Record an order."""
        state = LifeState(life=life, name=name, waits_for="a host of the cluster")
        self._lives[life] = Life(state, env, now)
        return state

    def find(self, life: str, name: str, env: str, now: float) -> None:
        """Record a life that an earlier service started."""
        self._lives[life] = Life(LifeState(life=life, name=name), env, now, acked=-1)

    def answer(self, life: str, told: HostState, now: float) -> LifeState | None:
        """Take the answer of a host; return the state if it is news. An end is told once all output has arrived."""
        one = self._lives.get(life)
        if one is None or one.state.over:
            return None
        one.answered, one.heard_at = True, now
        one.acked = told.offset + len(told.output)
        if told.state.over and (told.more or told.output):
            return None
        return self._change(one, replace(told.state, node=one.state.node))

    def end(self, life: str, why: str, code: int | None = None) -> LifeState | None:
        """Record that a life is over for another reason; return the state if it is news."""
        one = self._lives.get(life)
        if one is None or one.state.over:
            return None
        return self._change(one, replace(one.state, over=True, code=code, why=cut(why), waits_for=""))

    def placed(self, life: str, node: str) -> LifeState | None:
        """Record the node that was found for a life; return the state if it is news."""
        one = self._lives.get(life)
        if one is None or one.state.over or one.state.node:
            return None
        waits_for = "its node, to start it" if one.is_hostless else one.state.waits_for
        return self._change(one, replace(one.state, node=node, waits_for=waits_for))

    def nodeless(self) -> list[str]:
        """Return the lives that have no node yet."""
        return [one.state.life for one in self._open() if not one.state.node]

    def killed(self, life: str, now: float) -> None:
        """Record that SIGKILL was ordered."""
        one = self._lives.get(life)
        if one is not None:
            one.killed_at = min(one.killed_at, now)

    def release(self, life: str) -> bool:
        """Forget a life; return whether it was known."""
        return self._lives.pop(life, None) is not None

    def unplaced(self, now: float) -> list[Life]:
        """Return the lives whose wait for a host is over."""
        return [one for one in self._open() if not one.answered and now - one.since > self._timeout_s]

    def unkillable(self, now: float) -> list[Life]:
        """Return the lives that were killed and whose hosts are silent; one that sends their groups is not."""
        return [one for one in self._open() if now - max(one.killed_at, one.heard_at) > KILL_S]

    def waiting(self) -> list[Life]:
        """Return the lives without an answer yet."""
        return [one for one in self._open() if not one.answered]

    def _open(self) -> Iterable[Life]:
        return [one for one in self._lives.values() if not one.state.over]

    @staticmethod
    def _change(one: Life, state: LifeState) -> LifeState | None:
        if state == one.state:
            return None
        one.state = state
        return state
