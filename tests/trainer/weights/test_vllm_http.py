"""Transfers to a simulated vLLM: requests and their order; `test_sent` uses a real one.

The sender supplies any vLLM of the run before anybody samples, and again after a restart. The transfer file is locked
while it is written and read, and swept if its maker is killed.
"""

import errno
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.trainer.support.vllm_receiver import Server
from tests.trainer.weights.models import built, config

from rolloutmq.bus.log_throttle import EVERY_S
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.errors import (
    SegmentInUseError,
    WeightsMismatchError,
    WeightsNotSentError,
    WeightsTornError,
)
from rolloutmq.schemas.files import RunLayout, VllmAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.files.safetensors import TYPES
from rolloutmq.trainer.policy.model import skeleton
from rolloutmq.trainer.process import StoppedError, stop_on_signals
from rolloutmq.trainer.weights import vllm_http as sending
from rolloutmq.trainer.weights.address import owner_lives, read_sent, sweep
from rolloutmq.trainer.weights.layout import TensorSpec
from rolloutmq.trainer.weights.manifest import DTYPES
from rolloutmq.trainer.weights.share import Level
from rolloutmq.trainer.weights.vllm_http import SafetensorsFile, SentWeights, VllmSender, parcel

V = PolicyVersion


UPDATE = ["/pause?mode=keep", "/start_weight_update", "/update_weights"]


def test_weights_go_whole_between_pause_and_resume(server: Server, tmp_path: Path) -> None:
    model = built(config("qwen2"))
    sent = SentWeights.create(model, server.url, tmp_path, version=V(2, 7))
    assert server.asked[0] == "/init_weight_transfer_engine"
    server.asked.clear()
    with sent.writing(V(2, 8)), torch.no_grad():
        model.model.norm.weight.fill_(3.0)
        assert server.asked == []
    assert server.asked == [*UPDATE, "/finish_weight_update2.8", "/resume"]
    assert bool((server.received["model.norm.weight"] == 3.0).all())
    assert "lm_head.weight" not in server.received, "what is tied goes once"
    assert server.manifest == sent.manifest()
    assert (server.mode, server.held) == (0o600, True)
    assert list(tmp_path.iterdir()) == []
    assert (sent.version, sent.is_torn()) == (V(2, 8), False)
    with sent.reading() as version:
        assert version == V(2, 8)


def test_tensors_of_a_source_are_sent(server: Server, tmp_path: Path) -> None:
    model = built(config("qwen2"))
    state = dict(model.state_dict())
    meant = skeleton(model.config, torch.float32)
    sent = SentWeights.create(meant, server.url, tmp_path, source=lambda: state.items())
    assert torch.equal(server.received["model.norm.weight"], model.model.norm.weight)
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], 5.0)
    with sent.writing(V(0, 1)):
        pass
    assert bool((server.received["model.norm.weight"] == 5.0).all())
    del state["model.norm.weight"]
    server.asked.clear()
    with (
        pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight.*was not given"),
        sent.writing(V(0, 2)),
    ):
        pass
    assert server.asked == []  # vLLM keeps the weights before
    assert (sent.version, sent.is_torn()) == (V(0, 1), True)


def test_a_step_that_fails_sends_nothing_until_a_restore(server: Server, tmp_path: Path) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path, version=V(2, 7))
    server.asked.clear()
    with pytest.raises(ZeroDivisionError), sent.writing(V(2, 8)):
        raise ZeroDivisionError
    assert (sent.version, sent.is_torn()) == (V(2, 7), True)
    for attempt in (sent.writing(V(2, 8)), sent.reading()):
        with pytest.raises(WeightsTornError), attempt:
            pass
    assert server.asked == []
    with sent.writing(V(2, 7), restoring=True):
        pass
    assert server.asked[-1] == "/resume"
    assert (sent.version, sent.is_torn()) == (V(2, 7), False)


def test_a_file_without_room_is_said_and_nothing_is_paused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path, version=V(2, 7))
    server.asked.clear()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SafetensorsFile, "write", full)
    with pytest.raises(WeightsNotSentError, match="No space left"), sent.writing(V(2, 8)):
        pass
    assert server.asked == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_transfer_that_fails_leaves_it_paused_until_a_restore(
    server: Server, tmp_path: Path, failing: str
) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path)
    server.failing = failing
    server.asked.clear()
    with pytest.raises(WeightsNotSentError, match="status 500, no room"), sent.writing(V(0, 1)):
        pass
    assert "/resume" not in server.asked
    assert list(tmp_path.iterdir()) == []
    server.failing = ""
    for attempt in (sent.writing(V(0, 2)), sent.reading()):
        with pytest.raises(WeightsTornError), attempt:
            pass
    with sent.writing(V(1, 0), restoring=True):
        pass
    assert server.asked[-1] == "/resume"
    assert (sent.version, sent.is_torn()) == (V(1, 0), False)


def test_another_model_is_named_before_anything_is_paused(server: Server, tmp_path: Path) -> None:
    server.mismatch = {"tensor": "model.norm.weight", "problem": "shape is (3,)"}
    with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight: shape is"):
        SentWeights.create(built(config("llama")), server.url, tmp_path)
    assert server.asked == []


def test_what_it_holds_is_compared_tensor_by_tensor(server: Server, tmp_path: Path) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path)
    assert sent.verify(Level.MANIFEST).digests == {}
    server.digests = sent._fused_digests(exact=False)
    assert sent.verify(Level.DIGESTS).digests == server.digests
    server.digests["model.layers.1.mlp.gate_up_proj.weight"] = "another"
    with pytest.raises(WeightsMismatchError, match="gate_up_proj"):
        sent.verify(Level.DIGESTS)
    with pytest.raises(ValueError, match="other kernels give other logits"):
        sent.verify(Level.LOGITS)


def test_each_worker_of_a_vllm_must_fit(server: Server, tmp_path: Path) -> None:
    model, server.workers = built(config("llama")), 2
    sent = SentWeights.create(model, server.url, tmp_path)
    with pytest.raises(ValueError, match="level: each worker of vLLM has a part of the weights"):
        sent.verify(Level.DIGESTS)
    server.problem = "the second has no room"
    with pytest.raises(WeightsNotSentError, match="the second has no room"), sent.writing(V(0, 1)):
        pass
    assert sent.is_torn()
    assert server.asked[-1] == "/update_weights", "vLLM stays paused"
    server.mismatch = {"tensor": "model.norm.weight", "problem": "shape is"}
    with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight: shape is"):
        SentWeights.create(model, server.url, tmp_path)


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"results": []}', b'{"results": [null]}'])
def test_an_answer_that_is_none_is_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(SentWeights, "_post", lambda *_given, **_named: answer)
    with pytest.raises(WeightsNotSentError, match="malformed response to match_weights") as caught:
        SentWeights.create(built(config("llama")), server.url, tmp_path)
    assert not caught.value.away


def test_a_server_that_is_away(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:1", f"unix:{tmp_path}/nobody"):
        with pytest.raises(WeightsNotSentError, match="Error"):
            SentWeights.create(built(config("llama")), url, tmp_path)


DEADLINE_S = 60.0


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


@pytest.fixture
def sender(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmSender]:
    monkeypatch.setattr(sending, "PAUSE_S", 0.01)
    made = VllmSender.create(built(config("llama")), layout.weights, layout.vllm, version=V(1, 4))
    yield made
    made.close(unlink=True)


def there(layout: RunLayout, server: Server, nonce: str = "first") -> None:
    write_json(layout.vllm, VllmAddress(url=server.url, nonce=nonce))


def arrived(layout: RunLayout) -> PolicyVersion | None:
    found = read_sent(layout.weights)
    assert found is not None
    return found.version


def supplied(sender: VllmSender, meanwhile: Callable[[], None]) -> None:
    """Let it wait in a thread while something happens."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(sender.supply)
        try:
            meanwhile()
        except BaseException:
            sender._vllm_file.write_bytes(b"{")  # ends the wait, which would go on for ever
            raise
        waiting.result(DEADLINE_S)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S / 2
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_it_waits_for_a_vllm_and_then_sends_each_step(
    layout: RunLayout, server: Server, sender: VllmSender
) -> None:
    assert owner_lives(layout.weights)
    assert arrived(layout) is None
    assert not sender.supply(0.1)
    supplied(sender, lambda: there(layout, server))
    assert sender.supply(0.1)
    assert arrived(layout) == V(1, 4)
    for step in (5, 6):
        with sender.writing(V(1, step)):
            pass
        sender.supply()
        assert arrived(layout) == V(1, step)
    assert server.finished() == ["1.4", "1.5", "1.6"]
    assert server.asked.count("/init_weight_transfer_engine") == 1
    sender.close(unlink=True)
    assert not layout.weights.exists()


def test_steps_that_nobody_takes_stand_and_the_next_vllm_gets_them(
    layout: RunLayout, server: Server, sender: VllmSender
) -> None:
    there(layout, server)
    sender.supply()
    server.failing = "/start_weight_update"
    with sender.writing(V(1, 5)):
        pass
    assert sender.version == V(1, 5)
    assert arrived(layout) is None
    with sender.writing(V(1, 6)), torch.no_grad():
        next(iter(sender._model.parameters())).fill_(3.0)
    server.failing = ""
    server.received.clear()
    there(layout, server, "second")
    sender.supply()
    assert arrived(layout) == V(1, 6)
    assert server.finished() == ["1.4", "1.6"]
    assert bool((server.received["model.embed_tokens.weight"] == 3.0).all())


def test_a_vllm_that_was_started_anew_is_noticed(
    layout: RunLayout, server: Server, sender: VllmSender
) -> None:
    there(layout, server)
    sender.supply()
    sender.supply()
    assert server.finished() == ["1.4"]
    there(layout, server, "second")
    sender.supply()
    assert server.finished() == ["1.4", "1.4"]


def test_one_that_is_away_is_waited_for(
    layout: RunLayout, server: Server, sender: VllmSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, tried = SentWeights.create, Semaphore(0)

    def counted(*given: Any, **named: Any) -> Any:
        tried.release()
        return create(*given, **named)

    def comes() -> None:
        for _ in range(sending.REFUSALS + 1):
            assert tried.acquire(timeout=DEADLINE_S / 4)
        there(layout, server)

    monkeypatch.setattr(SentWeights, "create", counted)
    # As of an engine that was killed: what it said stays, and nobody listens there.
    write_json(layout.vllm, VllmAddress(url=f"unix:{layout.root}/nowhere", nonce="dead"))
    supplied(sender, comes)
    assert server.finished() == ["1.4"]


def test_why_it_waits_is_said_again_and_again_until_it_does_not(
    layout: RunLayout,
    server: Server,
    sender: VllmSender,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = itertools.count(0, EVERY_S / 4)
    monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))

    def waits() -> str:
        found = read_sent(layout.weights)
        assert found is not None
        return found.waits

    def comes() -> None:
        wait_until(lambda: caplog.text.count("why=no vLLM has published its address in vllm.json") >= 3)
        assert waits() == "no vLLM has published its address in vllm.json"
        write_json(layout.vllm, VllmAddress(url=f"unix:{layout.root}/nowhere", nonce="dead"))
        wait_until(lambda: "FileNotFoundError" in waits())
        there(layout, server)

    with caplog.at_level(logging.INFO):
        supplied(sender, comes)
    assert waits() == ""
    assert "why=weights: not sent to unix:" in caplog.text
    assert len(caplog.records) < next(clock) / EVERY_S + 5


def test_one_that_refuses_and_lives_ends_it_after_several_times(
    layout: RunLayout, server: Server, sender: VllmSender
) -> None:
    there(layout, server)
    server.failing = "/update_weights"
    with pytest.raises(WeightsNotSentError, match="/update_weights: status 500"):
        sender.supply()
    assert server.asked.count("/update_weights") == sending.REFUSALS


def test_another_model_ends_it_by_name(layout: RunLayout, server: Server, sender: VllmSender) -> None:
    there(layout, server)
    server.mismatch = {"tensor": "model.norm.weight", "problem": "shape is (3,)"}
    with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight: shape is"):
        sender.supply()
    assert arrived(layout) is None


def test_a_step_that_fails_sends_nothing(layout: RunLayout, server: Server, sender: VllmSender) -> None:
    there(layout, server)
    sender.supply()
    with pytest.raises(ZeroDivisionError), sender.writing(V(1, 5)):
        raise ZeroDivisionError
    assert server.finished() == ["1.4"]
    assert sender.version == V(1, 4)


def test_a_signal_ends_the_wait(sender: VllmSender) -> None:
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGTERM])
    with stop_on_signals() as stop:
        timer.start()
        with pytest.raises(StoppedError), stop.interrupting():
            sender.supply()
    timer.join()


SENDER = """
import sys
from pathlib import Path
from torch import nn
from rolloutmq.trainer.weights.vllm_http import VllmSender
from rolloutmq.trainer.weights.vllm_http import SentWeights
VllmSender.create(nn.Linear(4, 4), Path(sys.argv[1]), Path("vllm.json"))
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_living_senders_are_one_too_many_and_a_dead_one_is_none(layout: RunLayout) -> None:
    command: list[Any] = [sys.executable, "-c", SENDER, layout.weights]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(SegmentInUseError, match=f"process {other.pid}"):
            VllmSender.create(built(config("llama")), layout.weights, layout.vllm)
        assert sweep(layout.weights) == []
        other.kill()
    assert not owner_lives(layout.weights)
    assert layout.weights in sweep(layout.weights)
    assert not layout.weights.exists()


def tensors() -> dict[str, torch.Tensor]:
    found = {f"one.{kind}": torch.arange(15).reshape(3, 5).to(getattr(torch, kind)) for kind in DTYPES}
    return found | {"scalar": torch.tensor(2.5), "nothing": torch.empty(0, 3), "a": torch.ones(1).bool()}


def fill(
    made: SafetensorsFile,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str],
    *,
    backwards: bool = False,
) -> None:
    """Write the tensors, in their order or the other way round."""
    pairs = [(described(name, tensor), tensor) for name, tensor in tensors.items()]
    made.write([spec for spec, _ in pairs], reversed(pairs) if backwards else pairs, metadata)


def described(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return TensorSpec(
        name=name, dtype=dtype, shape=shape, stride=tensor.stride(), offset=0, nbytes=tensor.nbytes
    )


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    with parcel(tmp_path) as made:
        fill(made, tensors(), {"manifest": '{"name": "ä"}'})
        with safe_open(made.path, framework="pt") as file:
            assert file.metadata() == {"manifest": '{"name": "ä"}'}
            assert set(file.keys()) == set(tensors())
            for name, tensor in tensors().items():
                found = file.get_tensor(name)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(found, tensor)
    assert list(tmp_path.iterdir()) == []
    assert set(TYPES) == set(DTYPES)


def test_tensors_may_come_in_any_order(tmp_path: Path) -> None:
    with parcel(tmp_path) as made:
        fill(made, tensors(), {}, backwards=True)
        with safe_open(made.path, framework="pt") as file:
            assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors().items())


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    """Of tensors of one type, where the order of the library is the order of the names."""
    found = {name: torch.rand(3, 5) for name in "bca"}
    save_file(found, tmp_path / "theirs", metadata={"k": "v"})
    with parcel(tmp_path) as made:
        fill(made, found, {"k": "v"})
        assert made.path.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_it_is_held_as_long_as_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "SHM", tmp_path)
    with parcel(tmp_path) as made:
        fill(made, tensors(), {})
        assert os.fstat(made.fd).st_ino == made.path.stat().st_ino
        assert segment_file.in_use(made.path)
        assert segment_file.sweep() == []
        assert list(tmp_path.iterdir()) == [made.path]
    assert not made.path.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from rolloutmq.trainer.files import safetensors as safetensors_file
from rolloutmq.trainer.weights import vllm_http
from rolloutmq.trainer.weights.layout import TensorSpec
def die(tensor):
    os.kill(os.getpid(), signal.SIGKILL)
safetensors_file._bytes = die
spec = TensorSpec(name="a", dtype="float32", shape=(1 << 20,), stride=(1,), offset=0, nbytes=1 << 22)
with vllm_http.parcel(Path(sys.argv[1])) as made:
    made.write([spec], [(spec, torch.ones(1 << 20))], {"k": "v" * 100_000})
"""


def test_what_a_killed_maker_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "SHM", tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size > 0
    assert segment_file.sweep() == [left]  # at once, and not only when it is old
    assert list(tmp_path.iterdir()) == []
