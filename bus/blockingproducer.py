"""`Producer` for code without an event loop."""

from collections.abc import Mapping

from rolloutmq.bus.blocking import Facade
from rolloutmq.bus.credit import Permit
from rolloutmq.bus.producer import Producer
from rolloutmq.schemas.delivery import Durability, RunInfo
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.trajectory import Group


class BlockingProducer(Facade[Producer]):
    """`Producer` for code without an event loop: the same names, and every call blocks until it is done.

    Calls may come from several threads. A call that Ctrl-C interrupts has the effect of a cancelled one.
    """

    def acquire(self) -> Permit:
        """See `Producer.acquire`; `send` without a permit does it by itself."""
        return self._run(self._object.acquire())

    def send(self, group: Group, permit: Permit | None = None) -> None:
        """See `Producer.send`."""
        self._run(self._object.send(group, permit))

    def abandon(self, permit: Permit) -> None:
        """See `Producer.abandon`."""
        self._call(self._object.abandon, permit)

    def flush(self, timeout_s: float | None = None) -> bool:
        """See `Producer.flush`."""
        return self._run(self._object.flush(timeout_s))

    def start_draining(self) -> None:
        """See `Producer.start_draining`."""
        self._call(self._object.start_draining)

    @property
    def draining(self) -> bool:
        """Whether nothing new may be begun."""
        return self._object.draining.is_set()

    @property
    def info(self) -> RunInfo:
        """See `Producer.info`."""
        return self._object.info

    @property
    def session(self) -> int:
        """See `Producer.session`."""
        return self._object.session

    @property
    def policy(self) -> PolicyVersion:
        """See `Producer.policy`."""
        return self._object.policy

    @property
    def step(self) -> int:
        """See `Producer.step`."""
        return self._object.step

    @property
    def durability(self) -> Durability:
        """See `Producer.durability`."""
        return self._object.durability

    @property
    def accepted(self) -> int:
        """See `Producer.accepted`."""
        return self._object.accepted

    @property
    def unacked(self) -> int:
        """See `Producer.unacked`."""
        return self._object.unacked

    @property
    def as_frames(self) -> Mapping[str, int]:
        """See `Producer.as_frames`."""
        return self._object.as_frames

    @property
    def waits_s(self) -> float:
        """See `Producer.waits_s`."""
        return self._object.waits_s
