"""The data plane on real sockets, with a scripted core: limits, fairness, counts, the end."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.transport import sockets
from rolloutmq.schemas.files import DroppedGroup
from rolloutmq.schemas.wire.control import Drain, ScaleDecision
from rolloutmq.schemas.wire.envelope import (
    PROTOCOL_VERSION,
    Envelope,
    ErrorCode,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.schemas.wire.replies import ErrorReply, NoBatch, Ok, Wait
from rolloutmq.schemas.wire.requests import GetInfo, Pull, Request, Sync
from rolloutmq.services.broker.actions import Action, Answer, Dropped, Publish, Reply, Route
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.io import data_plane
from rolloutmq.services.broker.io.data_plane import (
    BURST_MESSAGES,
    BrokerLogs,
    BrokerSockets,
    DataPlane,
    Waker,
)
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore

LIMIT_S = 60.0
MAX_GROUP_BYTES = 300_000
NEVER_S = 1e9
PULL = Pull(consumer="c", step=1, version=PolicyVersion(), request_id="r", sequences=1)
DECISION = ScaleDecision(env="e", at=1.0, rollout_pressure=0.5, current=1, target=2, reason="r")


@dataclass
class Script:
    """A scripted core: records its calls and answers as set up."""

    answer: Callable[[Route, Request], list[Action]] = lambda route, _: [Reply(route, Ok())]
    accept: Callable[[Envelope], list[Action]] = lambda _: []
    on_subscribe: Callable[[bytes], list[Action]] = lambda _: []
    on_tick: Callable[[], list[Action]] = list
    deadline_in_s: float = NEVER_S
    is_reading: bool = True
    shutdown: bool = False
    taken: list[tuple[Envelope, Sequence[Any]]] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    topics: list[bytes] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def ingest(self, envelope: Envelope, frames: Sequence[Any], _now: float, _wall: float) -> list[Action]:
        with self.changed:
            self.taken.append((envelope, frames))
            self.changed.notify_all()
        return self.accept(envelope)

    def request(self, route: Route, request: Request, _now: float, _wall: float) -> list[Action]:
        return self.answer(route, request)

    def tick(self, now: float, _wall: float) -> list[Action]:
        with self.changed:
            self.ticks.append(now)
            self.changed.notify_all()
        return self.on_tick()

    def final_samples(self, _wall: float) -> list[Action]:
        return []

    def next_deadline(self, now: float) -> float:
        return (self.ticks[-1] if self.ticks else now) + self.deadline_in_s

    def subscribed(self, topic: bytes) -> list[Action]:
        with self.changed:
            self.topics.append(topic)
            self.changed.notify_all()
        return self.on_subscribe(topic)

    def reading(self) -> bool:
        return self.is_reading

    def answer_by(self, answer: Answer) -> None:
        """Answer by actions all the same, which the core may do."""

    def rejected(self, reason: str) -> None:
        with self.changed:
            self.rejections.append(reason)
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(until, LIMIT_S)


@dataclass
class Running:
    """A data plane in a thread, and the peers of the test."""

    script: Script
    plane: DataPlane
    context: sockets.Context
    directory: Path
    stack: ExitStack
    lines: list[bytes]
    thread: threading.Thread

    def address(self, name: str) -> str:
        return f"ipc://{self.directory}/{name}"

    def push(self) -> sockets.Socket:
        socket = sockets.producer_push(self.context, self.address("ingest"))
        self.stack.callback(socket.close)
        assert socket.poll(5000, zmq.POLLOUT)
        return socket

    def dealer(self) -> sockets.Socket:
        socket = sockets.client_dealer(self.context, self.address("serve"))
        self.stack.callback(socket.close)
        return socket

    def ask(self, dealer: sockets.Socket, *frames: bytes) -> list[bytes]:
        assert dealer.poll(5000, zmq.POLLOUT)
        dealer.send_multipart(frames)
        assert dealer.poll(5000)
        return dealer.recv_multipart()

    def subscriber(self, topic: bytes) -> sockets.Socket:
        socket = sockets.subscriber(self.context, self.address("events"), [topic])
        self.stack.callback(socket.close)
        self.script.wait(lambda: topic in self.script.topics)
        return socket

    def end(self) -> None:
        self.plane.stop()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


class _Lines(list[bytes]):
    def write(self, data: bytes, /) -> int:
        self.append(data)
        return len(data)


@contextmanager
def running(script: Script, directory: Path) -> Iterator[Running]:
    """Run a data plane on ipc sockets in a directory."""
    with ExitStack() as stack:
        context = sockets.make_context()
        stack.callback(context.term)
        bound = BrokerSockets(
            ingest=sockets.ingest_pull(context, MAX_GROUP_BYTES),
            serve=sockets.serve_router(context, 1 << 20),
            events=sockets.events_xpub(context),
            publish=sockets.publish_xsub(context, 1 << 16),
        )
        stack.callback(bound.close)
        for name in ("ingest", "serve", "events", "publish"):
            getattr(bound, name).bind(f"ipc://{directory}/{name}")
        bound.publish.send(b"\x01")  # everything: the filter under test is the plane's
        lines = _Lines()
        wake = Waker()
        stack.callback(wake.close)
        dead = DeadLetterStore(directory / "dead", 1 << 20, sync=False)
        plane = DataPlane(
            cast(BrokerCore, script), bound, BrokerLogs(lines, lines), dead, MAX_GROUP_BYTES, wake
        )
        thread = threading.Thread(target=plane.run)
        it = Running(script, plane, context, directory, stack, lines, thread)
        stack.callback(it.end)
        thread.start()
        yield it


def _message(number: int, *frames: bytes) -> list[bytes]:
    header = GroupHeader(
        seq=number,
        position=number,
        group_id=f"g-{number}",
        table="0" * 16,
        frames=len(frames),
        nbytes=sum(map(len, frames)),
        crc=0,
        sequences=1,
        tokens=1,
        oldest=PolicyVersion(),
        newest=PolicyVersion(),
        started_at=0.0,
        finished_at=0.0,
        rewards=RewardSummary(),
    )
    envelope = Envelope(PROTOCOL_VERSION, "p", 1, "r", "e", Split.TRAIN, (header,))
    return [codec.encode_envelope(envelope), *frames]


def _numbers(script: Script) -> list[int]:
    return [envelope.groups[0].seq for envelope, _ in script.taken]


def test_a_reply_leaves_before_what_is_published_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    perform = DataPlane._do

    def noted(self: DataPlane, action: Action) -> None:
        done.append(type(action).__name__)
        perform(self, action)

    monkeypatch.setattr(DataPlane, "_do", noted)
    drop = Dropped(DroppedGroup(at=1.0, group_id="g", state="expired", reason="stale"))
    script = Script(answer=lambda route, _: [Publish(b"t", DECISION), drop, Reply(route, Ok())])
    with running(script, tmp_path) as it:
        it.ask(it.dealer(), b"", codec.encode(GetInfo()))
    assert done == ["Dropped", "Reply", "Publish"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_trainer_is_answered_ahead_of_the_producers_that_ask_at_once(tmp_path: Path, ends: bool) -> None:
    many = 3 * BURST_MESSAGES
    answered: list[Request] = []
    busy, goes_on = threading.Event(), threading.Event()

    def answer(route: Route, request: Request) -> list[Action]:
        answered.append(request)
        busy.set()
        assert goes_on.wait(LIMIT_S)
        return [Reply(route, Ok())]

    with running(Script(answer=answer), tmp_path) as it:
        fleet, trainer = it.dealer(), it.dealer()
        assert fleet.poll(5000, zmq.POLLOUT)
        assert trainer.poll(5000, zmq.POLLOUT)
        for number in range(many):
            fleet.send_multipart([b"", codec.encode(Sync(producer="p", session=number + 1))])
        assert busy.wait(LIMIT_S)
        trainer.send_multipart([b"", codec.encode(PULL)])
        if ends:
            it.plane.stop()
        time.sleep(
            0.05
        )  # the library has it by then; if not, it comes a little later, and the bound still holds
        goes_on.set()
        for _ in range(many):
            assert fleet.poll(5000)
            fleet.recv_multipart()
        assert trainer.poll(5000)
    assert answered.index(PULL) <= 2 * BURST_MESSAGES
    assert [one.session for one in answered if isinstance(one, Sync)] == list(range(1, many + 1))


def test_producers_that_ask_too_much_are_not_read_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "BACKLOG_REQUESTS", 5)
    monkeypatch.setattr(data_plane, "BURST_MESSAGES", 1)
    longest = 0

    def answer(route: Route, _: Request) -> list[Action]:
        nonlocal longest
        longest = max(longest, len(it.plane._in_line))
        return [Reply(route, Ok())]

    with running(Script(answer=answer), tmp_path) as it:
        fleet = it.dealer()
        assert fleet.poll(5000, zmq.POLLOUT)
        for number in range(50):
            fleet.send_multipart([b"", codec.encode(Sync(producer="p", session=number + 1))])
        for _ in range(50):
            assert fleet.poll(5000)
            fleet.recv_multipart()
    assert longest <= 5
    assert it.plane._in_line_bytes == 0


def test_groups_arrive_whole_small_frames_copied_and_big_ones_kept(tmp_path: Path) -> None:
    script = Script()
    with running(script, tmp_path) as it:
        it.push().send_multipart(_message(1, b"s" * 5000, b"b" * 200_000))
        script.wait(lambda: len(script.taken) == 1)
    ((_, (small, big)),) = script.taken
    assert small == b"s" * 5000
    assert isinstance(big, zmq.Frame)
    assert big.bytes == b"b" * 200_000


BOMB = b"\x91" * 4000 + b"\xc0"


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"garbage", b"x"], "ingest: malformed"),
        ([b"", b""], "ingest: malformed"),
        ([BOMB], "ingest: malformed"),
        ([b"\xdd\xff\xff\xff\xff", b"x"], "ingest: malformed"),
        (_message(1, b"abc")[:1], "ingest: malformed"),
        ([*_message(1, b"abc"), b"more"], "ingest: malformed"),
        ([b"\x92\xff" + _message(1, b"abc")[0][2:], b"abc"], "ingest: malformed"),
        ([b"x" * 5000, b"abc"], "ingest: limit"),
        ([_message(1, b"abc")[0], *[b"x"] * 300], "ingest: limit"),
        ([_message(1, b"abc")[0], *[b"x" * 100_000] * 4], "ingest: limit"),
        (
            [_message(1, b"abc")[0][:1] + bytes([PROTOCOL_VERSION + 1]) + _message(1, b"abc")[0][2:], b"abc"],
            "ingest: version",
        ),
    ],
)
def test_what_is_no_group_is_counted_and_the_next_one_served(
    tmp_path: Path, frames: list[bytes], reason: str
) -> None:
    script = Script()
    with running(script, tmp_path) as it:
        push = it.push()
        push.send_multipart(frames)
        push.send_multipart(_message(2, b"good"))
        script.wait(lambda: len(script.taken) == 1)
        assert script.rejections == [reason]
        assert it.plane.rejections == {reason: 1}
    assert _numbers(script) == [2]


def test_frame_beyond_the_limit_costs_its_sender_the_connection(tmp_path: Path) -> None:
    script = Script()
    with running(script, tmp_path) as it:
        it.push().send_multipart(_message(1, bytes(MAX_GROUP_BYTES + 1)))
        it.push().send_multipart(_message(2, bytes(MAX_GROUP_BYTES)))
        script.wait(lambda: len(script.taken) == 1)
    assert _numbers(script) == [2]


def test_requests_are_answered_with_their_own_frames(tmp_path: Path) -> None:
    payload = (b"small", zmq.Frame(b"f" * 70_000, copy=True))
    script = Script(answer=lambda route, _: [Reply(route, Ok(), payload)])
    with running(script, tmp_path) as it:
        for _ in range(2):  # a kept frame can be sent again
            reply = it.ask(it.dealer(), b"n1", b"n2", b"", codec.encode(GetInfo()))
            assert reply == [b"n1", b"n2", b"", codec.encode(Ok()), b"small", b"f" * 70_000]


@pytest.mark.parametrize(
    "frames",
    [
        [b"7", b"", b"\xc1"],
        [b"7", b"", b""],
        [b"7", b"", codec.encode(Ok())],
        [b"7", b"", codec.encode(GetInfo()), b"more"],
        [b"7", b""],
        [b"7", b"", BOMB * 100],
    ],
)
def test_what_is_no_request_is_refused_by_name(tmp_path: Path, frames: list[bytes]) -> None:
    script = Script()
    with running(script, tmp_path) as it:
        dealer = it.dealer()
        *route, reply = it.ask(dealer, *frames)
        refusal = codec.decode_reply(reply)
        assert route == [b"7", b""]
        assert isinstance(refusal, ErrorReply)
        assert refusal.code is ErrorCode.MALFORMED
        assert it.ask(dealer, b"8", b"", codec.encode(GetInfo()))[0] == b"8"
        assert script.rejections == ["serve: malformed"]


@pytest.mark.parametrize(
    "frames",
    [
        [b"no empty frame"],
        [b"r" * 2000, b"", codec.encode(GetInfo())],
        [*[b"x"] * 300, b"", codec.encode(GetInfo())],
    ],
)
def test_request_without_a_return_address_is_counted(tmp_path: Path, frames: list[bytes]) -> None:
    script = Script()
    with running(script, tmp_path) as it:
        dealer = it.dealer()
        assert dealer.poll(5000, zmq.POLLOUT)
        dealer.send_multipart(frames)
        assert it.ask(dealer, b"8", b"", codec.encode(GetInfo()))[0] == b"8"
        assert script.rejections == ["serve: malformed"]


def test_reply_to_a_peer_that_left_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left: list[Route] = [(b"nobody", b"")]

    def answer(route: Route, _: Request) -> list[Action]:
        return [*(Reply(gone, Ok()) for gone in left), Reply(route, Ok())]

    with caplog.at_level(logging.INFO), running(Script(answer=answer), tmp_path) as it:
        it.ask(it.dealer(), b"1", b"", codec.encode(GetInfo()))
        assert it.plane.unsent == {"Ok: the peer is gone": 1}
    (record,) = [
        record for record in caplog.records if "peer" in record.message and "reply" in record.message
    ]
    assert (record.levelno, record.message) == (
        logging.INFO,
        "reply not sent reason=Ok: the peer is gone count=1",
    )


def test_peer_that_does_not_read_its_replies_holds_up_nobody(tmp_path: Path) -> None:
    payload = (bytes(60_000),)
    script = Script(answer=lambda route, _: [Reply(route, Ok(), payload)])
    with running(script, tmp_path) as it:
        deaf, other = it.dealer(), it.dealer()
        deaf.rcvhwm = 1
        for _ in range(3000):
            assert deaf.poll(5000, zmq.POLLOUT)
            deaf.send_multipart([b"", codec.encode(GetInfo())])
        reply = it.ask(other, b"1", b"", codec.encode(GetInfo()))
        assert reply[:2] == [b"1", b""]


def test_only_events_of_other_services_are_forwarded(tmp_path: Path) -> None:
    script = Script()
    event = codec.encode(DECISION)
    with running(script, tmp_path) as it:
        everything = it.subscriber(b"")
        with sockets.publisher(it.context, it.address("publish")) as publisher:
            while not everything.poll(5):  # until the plane's subscription has come
                publisher.send_multipart([b"telemetry.scale.e", event])
            for frames in (
                [topics.ack("p"), event],
                [b"pressure", event],
                [b"telemetry.x", b"garbage"],
                [b"step"],
                [b"step", event, b"more"],
                [topics.control("w"), codec.encode(Drain(worker="w"))],
                [b"step", event],
            ):
                publisher.send_multipart(frames)
            seen: list[list[bytes]] = []
            while not seen or seen[-1] != [b"step", event]:
                assert everything.poll(5000)
                seen.append(everything.recv_multipart())
        assert {tuple(frames) for frames in seen} == {(b"telemetry.scale.e", event), (b"step", event)}
        assert sorted(script.rejections) == [
            "publish: malformed",
            *["publish: not forwarded"] * 5,
        ]


def test_state_is_published_again_to_whoever_subscribes(tmp_path: Path) -> None:
    script = Script(on_subscribe=lambda topic: [Publish(topic, Drain(worker="w"))])
    with running(script, tmp_path) as it:
        for _ in range(2):
            subscriber = it.subscriber(topics.control("w"))
            assert subscriber.poll(5000)
            assert subscriber.recv_multipart()[1] == codec.encode(Drain(worker="w"))


def test_dropped_groups_are_lines(tmp_path: Path) -> None:
    record = DroppedGroup(at=1.0, group_id="g", state="expired", reason="stale")
    script = Script(accept=lambda _: [Dropped(record)])
    with running(script, tmp_path) as it:
        push = it.push()
        for number in (1, 2):
            push.send_multipart(_message(number, b"x"))
        script.wait(lambda: len(script.taken) == 2)
    assert [msgspec.json.decode(line, type=DroppedGroup) for line in it.lines] == [record] * 2
    assert all(line.endswith(b"\n") for line in it.lines)


def test_ingest_is_not_read_above_the_global_mark(tmp_path: Path) -> None:
    script = Script(is_reading=False)
    with running(script, tmp_path) as it:
        it.push().send_multipart(_message(1, b"x"))
        dealer = it.dealer()
        for _ in range(20):
            it.ask(dealer, b"", codec.encode(GetInfo()))
        assert script.taken == []
        script.is_reading = True
        it.ask(dealer, b"", codec.encode(GetInfo()))
        script.wait(lambda: len(script.taken) == 1)


def test_flood_of_groups_does_not_hold_up_requests(tmp_path: Path) -> None:
    script = Script()
    with running(script, tmp_path) as it:
        flooding = threading.Event()
        push = it.push()

        def flood() -> None:
            number = 0
            while not flooding.is_set():
                number += 1
                push.send_multipart(_message(number, b"x" * 5000))

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            script.wait(lambda: len(script.taken) > 200)
            dealer = it.dealer()
            before = len(script.taken)
            for _ in range(20):
                it.ask(dealer, b"", codec.encode(GetInfo()))
            assert len(script.taken) > before
        finally:  # a thread that sends on a closed socket aborts the process
            flooding.set()
            thread.join()


def test_bursts_are_bounded_and_acks_go_out_between_them(tmp_path: Path) -> None:
    """However many groups of one peer have arrived, all acks wait for one burst at most."""
    taken: list[int] = []

    def ticked() -> list[Action]:
        taken.append(len(script.taken))
        return []

    script = Script(deadline_in_s=0.0, on_tick=ticked)
    with running(script, tmp_path) as it:
        push, count = it.push(), 10 * BURST_MESSAGES
        for number in range(1, count + 1):
            push.send_multipart(_message(number, b"x"))
        script.wait(lambda: len(script.taken) == count)
    bursts = [after - before for before, after in pairwise([0, *taken])]
    assert 1 < max(bursts) <= BURST_MESSAGES


def test_what_controls_comes_before_the_groups_that_arrived_with_it(tmp_path: Path) -> None:
    order: list[str] = []
    inside = threading.Event()

    def arrived() -> list[Action]:
        inside.set()
        bound = it.plane._sockets
        while not order and not (bound.serve.poll(1) and bound.ingest.poll(1)):
            pass
        return []

    def answered(route: Route, _: Request) -> list[Action]:
        order.append("request")
        return [Reply(route, Ok())]

    def accepted(_: Envelope) -> list[Action]:
        order.append("group")
        return []

    script = Script(deadline_in_s=0.01, answer=answered, accept=accepted)
    with running(script, tmp_path) as it:
        push, dealer = it.push(), it.dealer()
        assert dealer.poll(5000, zmq.POLLOUT)
        script.on_tick = arrived
        assert inside.wait(LIMIT_S)
        push.send_multipart(_message(1, b"x"))
        dealer.send_multipart([b"", codec.encode(GetInfo())])
        assert dealer.poll(5000)
        script.wait(lambda: len(script.taken) == 1)
    assert order == ["request", "group"]


def test_tick_comes_at_its_deadline_and_not_all_the_time(tmp_path: Path) -> None:
    script = Script(deadline_in_s=0.02)
    with running(script, tmp_path):
        script.wait(lambda: len(script.ticks) >= 5)
    gaps = [later - earlier for earlier, later in zip(script.ticks, script.ticks[1:], strict=False)]
    assert all(gap >= 0.02 for gap in gaps[:4])


def test_waiting_without_work_takes_no_time_of_the_processor(tmp_path: Path) -> None:
    script = Script(deadline_in_s=0.05)
    with running(script, tmp_path):
        script.wait(lambda: len(script.ticks) >= 1)
        before = time.process_time()
        script.wait(lambda: len(script.ticks) >= 7)
        assert time.process_time() - before < 0.1


def test_what_has_arrived_is_taken_in_before_the_end(tmp_path: Path) -> None:
    script = Script()
    sent = threading.Event()

    def accept(envelope: Envelope) -> list[Action]:
        if envelope.groups[0].seq == 1:
            assert sent.wait(LIMIT_S)
        return []

    script.accept = accept
    with running(script, tmp_path) as it:
        push = it.push()
        for number in range(1, 121):  # fewer than the pipes hold, more than one burst
            push.send_multipart(_message(number, b"x" * 100))
        it.plane.stop()
        sent.set()
        it.thread.join(LIMIT_S)
    assert _numbers(script) == list(range(1, 121))


def test_shutdown_ends_the_plane_after_its_answer(tmp_path: Path) -> None:
    script = Script()

    def answer(route: Route, _: Request) -> list[Action]:
        script.shutdown = True
        return [Reply(route, NoBatch(wait=Wait.NONE, queued_sequences=0))]

    script.answer = answer
    with running(script, tmp_path) as it:
        reply = it.ask(it.dealer(), b"", codec.encode(GetInfo()))
        it.thread.join(LIMIT_S)
        assert not it.thread.is_alive()
    assert isinstance(codec.decode_reply(reply[1]), NoBatch)
