"""The receiver: versions whole or not at all, resumed transfers, changes only, and senders that lie."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.trainer.weights.stream.support import Engine, Trainer, V, Wire, received, wire
from tests.trainer.weights.stream.support import dial as dialed

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import LoraConfig
from rolloutmq.schemas.errors import (
    LimitExceededError,
    MalformedError,
    MissingError,
    RolloutMQError,
    SegmentInUseError,
    WeightsDamagedError,
    WeightsMismatchError,
    WeightsNotSentError,
    WeightsTornError,
)
from rolloutmq.schemas.files import RunIdentity, RunLayout, StreamAddress
from rolloutmq.trainer.policy.adapters import Adapters
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.stream import receiver as receiver_module
from rolloutmq.trainer.weights.stream import stage as stage_module
from rolloutmq.trainer.weights.stream.channel import Channel
from rolloutmq.trainer.weights.stream.chunks import CHUNK_BYTES, digests
from rolloutmq.trainer.weights.stream.messages import CHUNK, Done, Kind, Offer, layout_of, table_sum
from rolloutmq.trainer.weights.stream.receiver import Receiver
from rolloutmq.trainer.weights.stream.relay import serving
from rolloutmq.trainer.weights.stream.segment import WeightSegment


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()
    gc.collect()


opened: list[Channel] = []


def dial(address: StreamAddress, port: int = 0) -> Channel:
    """Connect; a test that fails leaves the connection to the fixture."""
    opened.append(dialed(address, port))
    return opened[-1]


def resumed(mine: Receiver, cable: Wire, address: StreamAddress) -> tuple[Channel, int]:
    """Take the rest of a cut transfer over a new connection; return it, and the bytes that passed."""
    cable.cut_after, before = None, cable.passed
    channel = dial(address, cable.port)
    mine.take_next(channel)
    return channel, cable.passed - before


def test_versions_arrive_whole_with_their_label(trainer: Trainer, host: RunLayout) -> None:
    with trainer.served() as address, received(host) as mine:
        channel = dial(address)
        assert mine.version is None
        assert mine.take_next(channel)
        engine = Engine(host)
        assert engine.version_whole() == V(0, 0)
        for step in (1, 2):
            trainer.step(step)
            mine.take_next(channel)
            assert engine.version_whole() == mine.version == V(0, step)
        channel.close()
        engine.share.close()


def test_an_address_of_other_hosts_is_sealed(trainer: Trainer, host: RunLayout) -> None:
    pytest.importorskip("cryptography")
    trainer.step(3)
    with trainer.served("tcp://0.0.0.0:0") as address, received(host) as mine:
        assert address.sealed
        channel = dial(address)
        assert channel.sealed
        mine.take_next(channel)
        engine = Engine(host)
        assert engine.version_whole() == V(0, 3)
        channel.close()
        engine.share.close()


def test_the_version_before_is_whole_until_the_next_is(trainer: Trainer, host: RunLayout) -> None:
    with trainer.served() as address, wire(address.port) as cable, received(host) as mine:
        channel = dial(address, cable.port)
        mine.take_next(channel)
        engine, whole = Engine(host), cable.passed
        trainer.step(1)
        cable.cut_after = whole + 5 * CHUNK_BYTES
        with pytest.raises(WeightsNotSentError, match="the connection was closed"):
            mine.take_next(channel)
        assert cable.passed > whole + 4 * CHUNK_BYTES
        assert engine.version_whole() == V(0, 0)
        channel.close()
        engine.share.close()


def test_a_transfer_cut_at_nine_tenths_is_resumed(trainer: Trainer, host: RunLayout) -> None:
    with trainer.served() as address, wire(address.port) as cable, received(host) as mine:
        channel = dial(address, cable.port)
        mine.take_next(channel)
        engine, whole = Engine(host), cable.passed
        trainer.step(1)
        cable.cut_after = int(1.9 * whole)
        with pytest.raises(WeightsNotSentError):
            mine.take_next(channel)
        channel.close()
        channel, passed = resumed(mine, cable, address)
        assert engine.version_whole() == V(0, 1)
        assert passed < 2.2 * CHUNK_BYTES  # of 11: the last one, and the one that was cut
        channel.close()
        engine.share.close()


def test_a_receiver_that_ends_within_its_first_transfer_leaves_its_chunks_to_the_next(
    trainer: Trainer, host: RunLayout
) -> None:
    trainer.step(1)
    with trainer.served() as address, wire(address.port) as cable:
        first = Receiver(host)
        cable.cut_after = 8 * CHUNK_BYTES
        channel = dial(address, cable.port)
        with pytest.raises(WeightsNotSentError):
            first.take_next(channel)
        channel.close()
        first.close()
        assert not host.weights.exists()
        cable.cut_after, before = None, cable.passed
        with received(host) as second:
            channel = dial(address, cable.port)
            second.take_next(channel)
            assert cable.passed - before < 4 * CHUNK_BYTES
            engine = Engine(host)
            assert engine.version_whole() == V(0, 1)
            channel.close()
            engine.share.close()


def test_a_version_that_is_here_is_not_written_again(trainer: Trainer, host: RunLayout) -> None:
    """Each write is news for the relays behind: two behind each other passed it to and fro without a pause."""
    with trainer.served() as address, received(host) as mine:
        channel = dial(address)
        mine.take_next(channel)
        engine, segment = Engine(host), WeightSegment.read(host.weights)
        write = segment.write
        with trainer.share.writing(V(0, 0)):
            pass  # another write of the same weights
        mine.take_next(channel)
        assert segment.write == write
        trainer.step(1)
        mine.take_next(channel)
        assert segment.write != write
        assert engine.version_whole() == V(0, 1)
        segment.close()
        channel.close()
        engine.share.close()


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0"], ids=["clear", "sealed"])
def test_versions_that_change_everything_are_sent_whole_and_resumed_after_a_cut(
    trainer: Trainer, host: RunLayout, listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of both sides took longer than the transfer."""
    if "0.0.0.0" in listen:
        pytest.importorskip("cryptography")
    made: list[int] = []
    real = stage_module.Stage.keep_whole

    def noted(stage: stage_module.Stage, index: int) -> None:
        made.append(index)
        real(stage, index)

    monkeypatch.setattr(stage_module.Stage, "keep_whole", noted)
    with trainer.served(listen) as address, wire(address.port) as cable, received(host) as mine:
        channel = dial(address, cable.port)
        mine.take_next(channel)
        engine, whole = Engine(host), cable.passed
        for step in range(1, 5):
            trainer.step(step)
            mine.take_next(channel)
            assert engine.version_whole() == V(0, step)
        chunks = len(made) // 3
        assert made == [*range(chunks)] * 3, "the first two showed that all of it changes"
        trainer.step(5)
        cable.cut_after = cable.passed + int(0.9 * whole)
        with pytest.raises(WeightsNotSentError):
            mine.take_next(channel)
        channel.close()
        channel, passed = resumed(mine, cable, address)
        assert engine.version_whole() == V(0, 5)
        assert passed < 2.2 * CHUNK_BYTES + 0.1 * whole, "only what was missing"
        channel.close()
        engine.share.close()


@pytest.mark.parametrize("at", [100, 5 * CHUNK_BYTES], ids=["first", "middle"])
def test_a_changed_byte_of_a_version_that_is_sent_whole_is_refused(
    trainer: Trainer, host: RunLayout, at: int
) -> None:
    with trainer.served() as address, wire(address.port) as cable, received(host) as mine:
        channel = dial(address, cable.port)
        for step in range(4):
            trainer.step(step)
            mine.take_next(channel)
        engine = Engine(host)
        trainer.step(4)
        cable.change_at = cable.passed + 200 + at
        with pytest.raises(WeightsDamagedError, match="does not match its checksum"):
            mine.take_next(channel)
        channel.close()
        assert engine.version_whole() == V(0, 3)
        channel = dial(address, cable.port)
        mine.take_next(channel)
        assert engine.version_whole() == V(0, 4)
        channel.close()
        engine.share.close()


def test_only_changed_chunks_are_sent(trainer: Trainer, host: RunLayout) -> None:
    with trainer.served() as address, wire(address.port) as cable, received(host) as mine:
        channel = dial(address, cable.port)
        mine.take_next(channel)
        before = cable.passed

        def one_weight() -> None:
            [*trainer.model.parameters()][6][7, 7] += 1

        trainer.step(1, one_weight)
        mine.take_next(channel)
        assert CHUNK_BYTES < cable.passed - before < 1.1 * CHUNK_BYTES
        engine = Engine(host)
        with engine.share.reading() as version:
            assert version == V(0, 1)
            for left, right in zip(engine.model.parameters(), trainer.model.parameters(), strict=True):
                assert torch.equal(left, right)
        channel.close()
        engine.share.close()


def test_of_adapters_only_their_layers_are_sent(run_dir: Path, host: RunLayout) -> None:
    pytest.importorskip("peft")
    layout = RunLayout(run_dir)
    config = RunConfig.model_validate({"model": {"hidden_size": 512, "layers": 2}})
    policy = build_policy(config.model, 0)
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",))
    adapters = Adapters(policy, lora)
    share = WeightShare.create_or_adopt(policy, layout.weights)
    learner = adapters.inject()
    sender, snapshots = serving(layout, "tcp://127.0.0.1:0", insecure=False)
    try:
        with received(host) as mine:
            found = read_json(layout.stream, StreamAddress)
            assert found is not None
            with wire(found.port) as cable:
                channel = dial(found, cable.port)
                mine.take_next(channel)
                whole = cable.passed
                with share.writing(V(0, 1)), torch.no_grad():
                    for name, parameter in learner.named_parameters():
                        if "lora_B" in name:
                            parameter.fill_(0.5)
                    adapters.publish()
                mine.take_next(channel)
                sent = cable.passed - whole
                assert 0 < sent < 0.5 * whole
                theirs = WeightSegment.read(host.weights)
                mine_at_the_trainer = WeightSegment.read(layout.weights)
                assert theirs.lock.version == V(0, 1)
                assert np.array_equal(theirs.data, mine_at_the_trainer.data)
                theirs.close()
                mine_at_the_trainer.close()
                channel.close()
    finally:
        sender.close()
        snapshots.close()
        share.close(unlink=True)


def test_a_receiver_that_was_busy_gets_the_newest_version(trainer: Trainer, host: RunLayout) -> None:
    with trainer.served() as address, wire(address.port) as cable, received(host) as mine:
        channel = dial(address, cable.port)
        mine.take_next(channel)
        trainer.step(1)
        cable.held.clear()
        taking = threading.Thread(target=mine.take_next, args=(channel,))
        taking.start()
        # The sender has offered version 1 once it has copied it; nothing of it comes through.
        while not _is_sending():
            taking.join(0.01)
        for step in (2, 3, 4):
            trainer.step(step)
        cable.held.set()
        taking.join()
        engine = Engine(host)
        assert engine.version_whole() == V(0, 1)
        mine.take_next(channel)
        assert engine.version_whole() == V(0, 4)
        channel.close()
        engine.share.close()


def _is_sending() -> bool:
    frames = sys._current_frames().values()
    return any(_in_transfer(frame) for frame in frames)


def _in_transfer(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_transfer":
            return True
        frame = frame.f_back
    return False


def test_a_changed_byte_is_refused_and_asked_for_again(trainer: Trainer, host: RunLayout) -> None:
    with trainer.served() as address, wire(address.port) as cable, received(host) as mine:
        channel = dial(address, cable.port)
        mine.take_next(channel)
        engine = Engine(host)
        trainer.step(1)
        cable.change_at = cable.passed + 3 * CHUNK_BYTES
        with pytest.raises(WeightsDamagedError, match=r"chunk 2 \(\d\.\w+.* does not match its checksum"):
            mine.take_next(channel)
        assert engine.version_whole() == V(0, 0)
        channel.close()
        cable.change_at = None
        channel = dial(address, cable.port)
        mine.take_next(channel)
        assert engine.version_whole() == V(0, 1)
        channel.close()
        engine.share.close()


def test_another_model_gets_memory_of_its_own(trainer: Trainer, host: RunLayout) -> None:
    with received(host) as mine:
        with trainer.served() as address:
            channel = dial(address)
            mine.take_next(channel)
            channel.close()
        old = Engine(host)
        path = segment_file.read_address(host.weights)
        assert path is not None
        other = Trainer(_fresh(host), layers=4)
        other.step(7)
        with other.served() as address:
            channel = dial(address)
            mine.take_next(channel)
            channel.close()
        assert old.share.is_replaced()
        assert not Path(path.path).exists()
        assert old.version_whole() == V(0, 0)
        new = Engine(host, layers=4)
        assert new.version_whole() == V(0, 7)
        old.share.close()
        new.share.close()
        other.close()


def _fresh(host: RunLayout) -> Any:
    root = host.root.parent / "other"
    root.mkdir(mode=0o700)
    return root


class Killed(BaseException):
    """Stands for a SIGKILL at this place."""


def test_a_receiver_killed_while_it_switches_finishes_in_its_next_life(
    trainer: Trainer, host: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(target: Any, parts: Any) -> None:
        half = parts[: len(parts) // 2]
        for offset, part in half:
            target[offset : offset + part.size] = part
        raise Killed

    with trainer.served() as address:
        first = Receiver(host)
        channel = dial(address)
        first.take_next(channel)
        engine = Engine(host)
        trainer.step(1)
        with monkeypatch.context() as patched:
            patched.setattr(receiver_module, "copy_parts", killed)
            with pytest.raises(Killed):
                first.take_next(channel)
        channel.close()
        with pytest.raises(WeightsTornError):
            engine.share.reading().__enter__()
        first.close()
    # There is no sender any more: the stage has all that is needed.
    with received(host) as second:
        assert second.version == engine.version_whole() == V(0, 1)
    engine.share.close()


def test_two_receivers_of_one_run_directory_are_refused(trainer: Trainer, host: RunLayout) -> None:
    with trainer.served() as address, received(host) as mine:
        channel = dial(address)
        mine.take_next(channel)
        with pytest.raises(SegmentInUseError, match=f"in use by process {os.getpid()}"):
            Receiver(host)
        channel.close()


class Liar:
    """A channel to a sender that says what it wants."""

    peer = "liar:1"
    sealed = False

    def __init__(self, *frames: tuple[Kind, bytes, bytes]) -> None:
        self.frames = list(frames)
        self.said: list[Kind] = []
        self.asked: list[int] = []
        self._data = b""

    def send(self, kind: Kind, _body: bytes = b"", _data: Any = b"") -> None:
        self.said.append(kind)

    def receive(self, limit: int = 4096) -> Any:
        from rolloutmq.trainer.weights.stream.channel import Frame

        kind, body, self._data = self.frames.pop(0)
        assert len(body) <= limit
        return Frame(kind, body, len(self._data), b"")

    def data_into(self, _frame: Any, into: memoryview) -> None:
        into[:] = self._data


@pytest.fixture
def truth(trainer: Trainer) -> Iterator[WeightSegment]:
    found = WeightSegment.read(trainer.layout.weights)
    yield found
    found.close()


def offer(truth: WeightSegment, **changes: Any) -> tuple[Kind, bytes, bytes]:
    honest = Offer(
        write=truth.write,
        version=V(0, 5),
        layout=truth.layout,
        manifest_bytes=len(truth.encoded),
        nbytes=truth.data.size,
    )
    return Kind.OFFER, msgspec.msgpack.encode(msgspec.structs.replace(honest, **changes)), b""


def chunks(truth: WeightSegment) -> list[tuple[Kind, bytes, bytes]]:
    found = []
    for index, row in enumerate(digests(truth.data)):
        data = truth.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].tobytes()
        found.append((Kind.CHUNK, CHUNK.pack(index, int(row["crc"]), int(row["sum"])), data))
    return found


def done(truth: WeightSegment, sent: int) -> tuple[Kind, bytes, bytes]:
    table = digests(truth.data)
    told = Done(sent=sent, same=len(table) - sent, table=table_sum(table))
    return Kind.DONE, msgspec.msgpack.encode(told), b""


def test_an_honest_transfer_of_these_frames_is_taken(truth: WeightSegment, host: RunLayout) -> None:
    frames = [
        offer(truth),
        (Kind.MANIFEST, truth.encoded, b""),
        *chunks(truth),
        done(truth, len(chunks(truth))),
    ]
    with received(host) as mine:
        mine.take_next(Liar(*frames))  # type: ignore[arg-type]
        assert mine.version == V(0, 5)


Lie = tuple[str, type[RolloutMQError], str]
LIES: list[Lie] = [
    (
        "huge",
        MissingError,
        r"room in /dev/shm is missing: weights of .* need .* MB free .*--shm-size",
    ),
    ("huge manifest", LimitExceededError, "manifest of offered weights"),
    ("negative", MalformedError, "impossible number"),
    ("nameless", MalformedError, "without a write"),
    ("no offer", MalformedError, "expected OFFER, got DONE"),
    ("garbage", MalformedError, "not a message Offer"),
    ("other manifest", WeightsMismatchError, "differs from the offered one"),
    ("missing chunk", WeightsDamagedError, "1 are missing"),
    ("chunk twice for another", WeightsDamagedError, "1 are missing"),
    ("number of no chunk", MalformedError, r"chunk 1000 of \d+"),
    ("short chunk", MalformedError, "with 5 bytes"),
    ("wrong digest", WeightsDamagedError, "chunk 0 .* does not match its checksum"),
    ("wrong sum", WeightsDamagedError, "the digests differ"),
]


@pytest.mark.parametrize(("lie", "error", "text"), LIES, ids=[lie for lie, _, _ in LIES])
def test_what_a_lying_sender_says_is_refused(
    truth: WeightSegment, host: RunLayout, lie: str, error: type[RolloutMQError], text: str
) -> None:
    with received(host) as mine:
        with pytest.raises(error, match=text):
            mine.take_next(Liar(*lies(truth, lie)))  # type: ignore[arg-type]
        assert mine.version is None
        assert not host.weights.exists()


def lies(truth: WeightSegment, lie: str) -> list[tuple[Kind, bytes, bytes]]:
    manifest = (Kind.MANIFEST, truth.encoded, b"")
    parts = chunks(truth)
    whole = [offer(truth), manifest, *parts, done(truth, len(parts))]
    first = parts[0]
    wrong = Done(sent=len(parts), same=0, table=1)
    return {
        "huge": [offer(truth, nbytes=1 << 60)],
        "huge manifest": [offer(truth, manifest_bytes=1 << 40)],
        "negative": [offer(truth, nbytes=-1)],
        "nameless": [offer(truth, write="")],
        "no offer": [done(truth, 0)],
        "garbage": [(Kind.OFFER, b"\xff\x00", b"")],
        "other manifest": [offer(truth, layout="0" * 64), manifest],
        "missing chunk": [*whole[:3], *whole[4:-1], done(truth, len(parts) - 1)],
        "chunk twice for another": [offer(truth), manifest, first, first, *parts[2:], whole[-1]],
        "number of no chunk": [offer(truth), manifest, (Kind.CHUNK, CHUNK.pack(1000, 0, 0), b"x")],
        "short chunk": [offer(truth), manifest, (Kind.CHUNK, first[1], b"short")],
        "wrong digest": [offer(truth), manifest, (Kind.CHUNK, CHUNK.pack(0, 1, 1), first[2])],
        "wrong sum": [*whole[:-1], (Kind.DONE, msgspec.msgpack.encode(wrong), b"")],
    }[lie]


def test_a_manifest_may_be_large_only_as_announced(truth: WeightSegment, host: RunLayout) -> None:
    small = offer(truth, manifest_bytes=10, layout=layout_of(truth.encoded))
    with received(host) as mine, pytest.raises(AssertionError):  # the channel's limit, of the stand-in here
        mine.take_next(Liar(small, (Kind.MANIFEST, truth.encoded, b"")))  # type: ignore[arg-type]


def test_weights_of_another_run_are_not_taken(tmp_path: Path) -> None:
    """The address of a sender may belong to a fresh run of the same name by now."""
    layouts = [RunLayout(tmp_path / name) for name in ("trainer", "far")]
    for number, layout in enumerate(layouts):
        layout.root.mkdir()
        write_json(layout.identity, RunIdentity(run_id=f"{number}" * 32))
    trainer = Trainer(layouts[0].root)
    try:
        with trainer.served() as address, received(layouts[1]) as receiver:
            channel = dial(address)
            with pytest.raises(WeightsNotSentError, match=r"another run \(got 00000000, not 11111111\)"):
                receiver.follow(channel)
            channel.close()
            assert receiver.version is None
    finally:
        trainer.close()
