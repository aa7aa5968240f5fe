"""GPUs asked one by one, so that a driver that hangs for one of them costs the others nothing. See `calls`.

A GPU that was listed once stays known: if the driver lists it no more, that is a lost GPU and not one less. One whose
call hangs is silent, and its sample says for how long.
"""

from functools import partial
from typing import Final, Protocol

from rolloutmq.schemas.telemetry import GpuAbsence, GpuSample, GpuState
from rolloutmq.services.telemetry.calls import CALL_TIMEOUT_S, Calls, NothingToAskError

LIST: Final = "gpus"
"""Key of the call that lists them; no UUID is like it."""


class NoGpuError(NothingToAskError):
    """There is no GPU to ask, and why."""


class GpuBackend(Protocol):
    """What can be asked for GPUs. Every call may block and may hang; it is called from several threads."""

    def uuids(self) -> tuple[str, ...]:
        """List the GPUs that can be reached; NoGpuError if there are none."""
        ...

    def read(self, uuid: str, number: int, now: float) -> GpuSample:
        """Sample a GPU that was listed once."""
        ...


class GpuProbe:
    """Samples all GPUs of a host, for one event loop.

    Args:
        backend: Who is asked.
        host: Name of this host, for what is said where nothing answers.
        timeout_s: Longest wait for one answer.
    """

    def __init__(self, backend: GpuBackend, host: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._backend = backend
        self._host = host
        self._calls = Calls(timeout_s)
        self._last: dict[str, GpuSample] = {}

    async def sample(self, number: int, now: float) -> tuple[GpuSample, ...] | GpuAbsence:
        """Sample every GPU once; takes twice the time-out at the very most. Cancellation leaves calls under way."""
        listed, why = await self._list(now)
        uuids = (*listed, *(uuid for uuid in self._last if uuid not in listed))
        if not uuids:
            return GpuAbsence(host=self._host, number=number, at=now, why=why)
        asks = {uuid: partial(self._backend.read, uuid, number, now) for uuid in uuids}
        found = await self._calls.make(asks, now)
        for uuid in uuids:
            sample = found.get(uuid)
            if not isinstance(sample, GpuSample):
                sample = self._blank(uuid, number, now, GpuState.SILENT, self._why(uuid, sample, now))
            if not why and uuid not in listed and sample.state is not GpuState.LOST:
                sample = self._blank(uuid, number, now, GpuState.LOST, "the driver does not list it any more")
            self._last[uuid] = sample
        return tuple(self._last[uuid] for uuid in uuids)

    async def _list(self, now: float) -> tuple[tuple[str, ...], str]:
        """Return what can be reached, and why nothing can."""
        found = (await self._calls.make({LIST: self._backend.uuids}, now)).get(LIST)
        return (found, "") if isinstance(found, tuple) else ((), self._why(LIST, found, now))

    def _why(self, key: str, error: Exception | None, now: float) -> str:
        """Say why there is no answer: an error, or none yet."""
        if error is None:
            return f"the driver has not answered for {self._calls.waited_s(key, now):.0f} s"
        return str(error) if isinstance(error, NoGpuError) else f"{type(error).__name__}: {error}"

    def _blank(self, uuid: str, number: int, now: float, state: GpuState, why: str) -> GpuSample:
        last = self._last.get(uuid)
        name, index = (last.name, last.index) if last is not None else ("", 0)
        return GpuSample(
            uuid=uuid, number=number, at=now, name=name, index=index, host=self._host, state=state, why=why
        )
