"""A trainer that sends: to whichever vLLM is there, before anybody samples, and again when it was another one."""

import itertools
import logging
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
from tests.trainer.weights.models import built, config
from tests.trainer.weights.receiver import Server

from rolloutmq.bus.refrain import EVERY_S
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import VllmAddress
from rolloutmq.schemas.sharing import SegmentInUseError, WeightsMismatchError, WeightsNotSentError
from rolloutmq.trainer.process import StoppedError, stop_on_signals
from rolloutmq.trainer.weights import sender as sending
from rolloutmq.trainer.weights.address import owner_lives, read_sent, sweep
from rolloutmq.trainer.weights.sender import Sender
from rolloutmq.trainer.weights.vllm_http import SentWeights

V = PolicyVersion
DEADLINE_S = 20.0


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


@pytest.fixture
def sender(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr(sending, "PAUSE_S", 0.01)
    made = Sender.create(built(config("llama")), layout.weights, layout.vllm, version=V(1, 4))
    yield made
    made.close(unlink=True)


def there(layout: RunLayout, server: Server, nonce: str = "first") -> None:
    write_json(layout.vllm, VllmAddress(url=server.url, nonce=nonce))


def arrived(layout: RunLayout) -> PolicyVersion | None:
    found = read_sent(layout.weights)
    assert found is not None
    return found.version


def supplied(sender: Sender, meanwhile: Callable[[], None]) -> None:
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
    layout: RunLayout, server: Server, sender: Sender
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
    layout: RunLayout, server: Server, sender: Sender
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


def test_a_vllm_that_was_started_anew_is_noticed(layout: RunLayout, server: Server, sender: Sender) -> None:
    there(layout, server)
    sender.supply()
    sender.supply()
    assert server.finished() == ["1.4"]
    there(layout, server, "second")
    sender.supply()
    assert server.finished() == ["1.4", "1.4"]


def test_one_that_is_away_is_waited_for(
    layout: RunLayout, server: Server, sender: Sender, monkeypatch: pytest.MonkeyPatch
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
    sender: Sender,
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
        wait_until(lambda: caplog.text.count("why=no vLLM has said in vllm.json where it is") >= 3)
        assert waits() == "no vLLM has said in vllm.json where it is"
        write_json(layout.vllm, VllmAddress(url=f"unix:{layout.root}/nowhere", nonce="dead"))
        wait_until(lambda: "FileNotFoundError" in waits())
        there(layout, server)

    with caplog.at_level(logging.INFO):
        supplied(sender, comes)
    assert waits() == ""
    assert "why=the weights did not reach unix:" in caplog.text
    assert len(caplog.records) < next(clock) / EVERY_S + 5


def test_one_that_refuses_and_lives_ends_it_after_several_times(
    layout: RunLayout, server: Server, sender: Sender
) -> None:
    there(layout, server)
    server.failing = "/update_weights"
    with pytest.raises(WeightsNotSentError, match="/update_weights: status 500"):
        sender.supply()
    assert server.asked.count("/update_weights") == sending.REFUSALS


def test_another_model_ends_it_by_name(layout: RunLayout, server: Server, sender: Sender) -> None:
    there(layout, server)
    server.mismatch = {"tensor": "model.norm.weight", "problem": "shape is (3,)"}
    with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight: shape is"):
        sender.supply()
    assert arrived(layout) is None


def test_a_step_that_fails_sends_nothing(layout: RunLayout, server: Server, sender: Sender) -> None:
    there(layout, server)
    sender.supply()
    with pytest.raises(ZeroDivisionError), sender.writing(V(1, 5)):
        raise ZeroDivisionError
    assert server.finished() == ["1.4"]
    assert sender.version == V(1, 4)


def test_a_signal_ends_the_wait(sender: Sender) -> None:
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
from rolloutmq.trainer.weights.sender import Sender
from rolloutmq.trainer.weights.vllm_http import SentWeights
Sender.create(nn.Linear(4, 4), Path(sys.argv[1]), Path("vllm.json"))
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_living_senders_are_one_too_many_and_a_dead_one_is_none(layout: RunLayout) -> None:
    command: list[Any] = [sys.executable, "-c", SENDER, layout.weights]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(SegmentInUseError, match=f"process {other.pid}"):
            Sender.create(built(config("llama")), layout.weights, layout.vllm)
        assert sweep(layout.weights) == []
        other.kill()
    assert not owner_lives(layout.weights)
    assert layout.weights in sweep(layout.weights)
    assert not layout.weights.exists()
