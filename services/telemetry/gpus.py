"""GPU sampling, one bounded call for each GPU, so that a driver hanging on one does not delay the others.

A GPU once listed stays known: if the driver stops listing it, it is reported as lost. A GPU with a hanging call is
reported as silent, with the duration.
"""

from functools import partial
from typing import Final, Protocol

from rolloutmq.schemas.wire.telemetry import GpuAbsence, GpuSample, GpuState
from rolloutmq.services.telemetry.bounded_calls import CALL_TIMEOUT_S, BoundedCalls, NothingToAskError

LIST: Final = "gpus"
"""Key of the listing call; no UUID looks like it."""


class NoGpuError(NothingToAskError):
    """There is no GPU to sample, with the reason."""


class GpuBackend(Protocol):
    """GPU driver. Every call may block or hang, and comes from several threads."""

    def uuids(self) -> tuple[str, ...]:
        """Return the reachable GPUs; NoGpuError if there are none."""
        ...

    def read(self, uuid: str, number: int, now: float) -> GpuSample:
        """Sample a GPU that was listed before."""
        ...


class GpuProbe:
    """Samples all GPUs of a host, for one event loop.

    Args:
        backend: GPU driver.
        host: Name of this host, for reports without any GPU.
        timeout_s: Time-out of one call.
    """

    def __init__(self, backend: GpuBackend, host: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._backend = backend
        self._host = host
        self._calls = BoundedCalls(timeout_s)
        self._last: dict[str, GpuSample] = {}

    async def sample(self, number: int, now: float) -> tuple[GpuSample, ...] | GpuAbsence:
        """Sample every GPU once; takes at most twice the time-out. Cancellation leaves calls in flight."""
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
                sample = self._blank(uuid, number, now, GpuState.LOST, "no longer listed by the driver")
            self._last[uuid] = sample
        return tuple(self._last[uuid] for uuid in uuids)

    async def _list(self, now: float) -> tuple[tuple[str, ...], str]:
        """Return the reachable GPUs, or why there is none."""
        found = (await self._calls.make({LIST: self._backend.uuids}, now)).get(LIST)
        return (found, "") if isinstance(found, tuple) else ((), self._why(LIST, found, now))

    def _why(self, key: str, error: Exception | None, now: float) -> str:
        """Return why there is no result: an error, or no reply yet."""
        if error is None:
            return f"no reply from the driver for {self._calls.waited_s(key, now):.0f} s"
        return str(error) if isinstance(error, NoGpuError) else f"{type(error).__name__}: {error}"

    def _blank(self, uuid: str, number: int, now: float, state: GpuState, why: str) -> GpuSample:
        last = self._last.get(uuid)
        name, index = (last.name, last.index) if last is not None else ("", 0)
        return GpuSample(
            uuid=uuid, number=number, at=now, name=name, index=index, host=self._host, state=state, why=why
        )
