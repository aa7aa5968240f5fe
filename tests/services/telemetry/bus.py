"""A bus without a broker, and what telemetry records of it."""

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import zmq

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.telemetry import GpuSample


class OneGpu:
    """A GPU at work, whose driver answers while it is `free`."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def uuids(self) -> tuple[str, ...]:
        return ("GPU-7",)

    def read(self, uuid: str, number: int, now: float) -> GpuSample:
        self.free.wait()
        return GpuSample(uuid=uuid, number=number, at=now, name="Fake", utilisation_percent=50.0)


@contextlib.contextmanager
def forwarding(layout: RunLayout) -> Iterator[None]:
    """Forward `publish` to `events`, as a broker does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publish, events = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    addresses = {name: f"ipc://{layout.root}/{name}" for name in ("publish", "events")}
    publish.bind(addresses["publish"])
    events.bind(addresses["events"])
    ended = threading.Event()

    def forward() -> None:
        while not ended.is_set():
            if publish.poll(20):
                events.send_multipart(publish.recv_multipart())
            while events.poll(0):
                publish.send(events.recv())

    thread = threading.Thread(target=forward)
    thread.start()
    found = Endpoints(
        ingest="", serve="", pid=1, epoch=1, events=addresses["events"], publish=addresses["publish"]
    )
    write_json(layout.endpoints, found)
    try:
        yield
    finally:
        ended.set()
        thread.join()
        context.destroy(linger=0)


def recorded(layout: RunLayout) -> dict[str, list[dict[str, Any]]]:
    by_kind = defaultdict(list)
    if layout.metrics.exists():
        for line in layout.metrics.read_text().splitlines():
            fields = json.loads(line)
            by_kind[fields["kind"]].append(fields)
    return by_kind
