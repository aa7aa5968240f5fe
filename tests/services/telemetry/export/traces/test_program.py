"""Groups of a real broker, traced by the real process to a receiver of OTLP: `make test-export`."""

import http.server
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutmq import Consumer, Group, PolicyVersion, Producer
from rolloutmq.bus.encoding import topics
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.tracing import Call, RolloutTrace
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.telemetry.export.packages import TRACES
from rolloutmq.services.telemetry.export.traces import program
from rolloutmq.services.telemetry.export.traces.spans import trace_id_of

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(
        not TRACES.is_met or importlib.util.find_spec("opentelemetry.proto") is None,
        reason="OpenTelemetry is in an environment of its own: make test-export",
    ),
]
WITHIN_S = 60.0


class Receiver(http.server.BaseHTTPRequestHandler):
    """Receiver of traces; the server keeps the spans and says with which status it answers."""

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        server.requests += 1
        if server.status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                assert names["service.name"] == "rolloutmq"
                server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiver(status: int = 200) -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.spans, server.status, server.requests = [], status, 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(WITHIN_S)
        server.server_close()


@contextmanager
def tracing(layout: RunLayout) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the process of the traces for the block, once it follows; then end its input, and require that it ends."""
    command, log = (
        [sys.executable, "-P", "-m", program.__name__, str(layout.root)],
        layout.root / "traces.log",
    )
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output) as child,
    ):
        try:
            until(lambda: "traces started" in log.read_text())
            yield child
            assert child.stdin is not None
            child.stdin.close()
            assert child.wait(WITHIN_S) == 0
        finally:
            child.kill()


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def configured(layout: RunLayout, port: int, ratio: float = 1.0) -> RunConfig:
    url = f"http://127.0.0.1:{port}/v1/traces"
    config = validate({"telemetry": {"trace_ratio": ratio, "otlp_url": url}})
    write_json(layout.config, config.model_dump(mode="json"))
    return config


def group(name: str) -> Group:
    now = time.time()
    columns: dict[str, Any] = {"tokens": [[1, 2], [1, 3]], "mask": [[0, 1], [0, 1]], "scores": [0.0, 1.0]}
    return Group.build(name, **columns, started_at=now - 2.0, finished_at=now - 0.5)


def calls_of(name: str) -> RolloutTrace:
    call = Call(
        engine="http://e", path="/v1/completions", began_at=time.time() - 1.5, seconds=0.5, status=200
    )
    return RolloutTrace(group_id=name, env="mine", worker="p", at=time.time(), calls=(call,))


def train(run_dir: Path, names: list[str]) -> None:
    """Send groups, train on them, and commit."""
    with (
        Producer.blocking(run_dir, env="mine", producer="p", group_size=2, slots=4) as producer,
        Consumer.blocking(run_dir, sequences=2) as consumer,
    ):
        for name in names:
            producer.send(group(name), timeout_s=WITHIN_S)
        for _, batch in zip(names, consumer, strict=False):
            batch.ack()
            last = batch.step
        consumer.commit(PolicyVersion(0, last))


def traced(server: Any, name: str) -> list[Any]:
    """Return the spans of a group."""
    return [span for span in server.spans if span.trace_id == trace_id_of(name).to_bytes(16, "big")]


def test_a_group_is_one_tree_from_its_rollout_to_its_checkpoint(run_dir: Path) -> None:
    layout, spans = RunLayout(run_dir), []
    with receiver() as server:
        config = configured(layout, server.server_port)
        with (
            running_broker(config, layout) as broker,
            tracing(layout),
            Publisher(broker.endpoints.publish) as publisher,
        ):
            for number in range(20):  # the first calls may be published before anybody listens
                name = f"g-{number}"
                publisher.publish(topics.telemetry("trace", "p"), calls_of(name))
                train(run_dir, [name])
                until(lambda: len(traced(server, name)) >= 6)  # noqa: B023 - awaited in this round
                spans = traced(server, name)
                if len(spans) > 6:
                    break
    assert sorted(span.name for span in spans) == [
        "call",
        "commit",
        "group",
        "queue",
        "rollout",
        "send",
        "train",
    ]
    (root,) = [span for span in spans if not span.parent_span_id]
    attributes = {one.key: one.value for one in root.attributes}
    assert attributes["rolloutmq.group"].string_value == name
    assert attributes["rolloutmq.outcome"].string_value == "committed"
    times = {span.name: (span.start_time_unix_nano, span.end_time_unix_nano) for span in spans}
    assert times["group"] == (times["rollout"][0], times["commit"][1])
    for before, after in (("rollout", "send"), ("send", "queue"), ("queue", "train"), ("train", "commit")):
        assert abs(times[before][1] - times[after][0]) < 1_000_000, (before, after)
    (rollout,) = [span for span in spans if span.name == "rollout"]
    (call,) = [span for span in spans if span.name == "call"]
    assert call.parent_span_id == rollout.span_id
    assert call.kind == 3  # a client's


def test_a_receiver_that_is_away_costs_the_traces_only(run_dir: Path) -> None:
    layout, names = RunLayout(run_dir), ["g-0", "g-1"]
    with receiver(status=400) as server:
        config = configured(layout, server.server_port)
        with running_broker(config, layout), tracing(layout) as child:
            train(run_dir, names)
            assert child.stdout is not None
            outcomes = [json.loads(child.stdout.readline()) for _ in names]
    (why,) = {outcome["why"] for outcome in outcomes}
    assert why.startswith("the receiver of traces does not take them: ")
    assert "400" in why
    assert server.requests >= 1
    assert "400" not in (run_dir / "traces.log").read_text()  # telemetry logs the reason, once


def test_a_receiver_that_is_not_there_leaves_no_lines_of_the_sdk(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with receiver() as gone:
        config = configured(layout, gone.server_port)
    with running_broker(config, layout), tracing(layout) as child:
        train(run_dir, ["g-0"])
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["why"].startswith("the receiver of traces does not take")
    lines = (run_dir / "traces.log").read_text().splitlines()
    assert [line for line in lines if "traces started" not in line] == []


def test_groups_of_an_earlier_life_are_not_sent_again(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with receiver() as server:
        config = configured(layout, server.server_port)
        with running_broker(config, layout):
            train(run_dir, ["old"])
            time.sleep(1.1)  # the clock of the spans
            with tracing(layout):
                train(run_dir, ["new"])
                until(lambda: bool(server.spans))
    assert {span.trace_id for span in server.spans} == {trace_id_of("new").to_bytes(16, "big")}
