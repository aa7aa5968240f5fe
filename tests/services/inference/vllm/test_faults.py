"""A real vLLM when a process dies; and the numerics of half precision. `make test-vllm` runs them."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from tests.services.inference.vllm.support.child import END_S, child
from tests.services.inference.vllm.support.lent import (
    START_S,
    Engine,
    Lender,
    lent,
    missing,
    model_of,
    worst,
)
from tests.services.inference.vllm.support.under_way import under_way, until

from rolloutmq.schemas.config.trainer import WeightsConfig
from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.vllm.client import VllmClient
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.vllm_http import SentWeights, VllmSender

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

EXACT = 1e-5
HALF = {"qwen2": 0.08, "qwen3": 0.08, "llama": 0.1}
"""Nats in bfloat16. Measured: up to 0.03, 0.03 and 0.04; kernels round elsewhere, and vLLM rounds the RoPE table."""


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def listening(process: psutil.Process) -> set[str]:
    return {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}


OWNER = """
import os, sys
from pathlib import Path
import torch
from tests.services.inference.vllm.support.lent import model_of
from rolloutmq.trainer.weights.posix_shm import WeightShare
torch.set_num_threads(1)
share = WeightShare.create_or_adopt(model_of(sys.argv[2]), Path(sys.argv[1]), fused=True)
os._exit(0)
"""


def asked_to_attach(layout: RunLayout, address: Path, tokenizer: str = "") -> dict[str, object]:
    async def ask() -> dict[str, object]:
        async with VllmClient.opened(layout.sockets / "inference-vllm" / "http") as client:
            return await client.call("attach_weights", str(address), tokenizer)

    return asyncio.run(ask())


def test_a_kill_leaves_nothing_behind_and_what_does_not_fit_is_not_attached(tmp_path: Path) -> None:
    """One start for all of it: other weights, those of the dead, vLLM killed, its supervisor killed."""
    with lent(tmp_path / "run", "qwen2") as (trainer, engine):
        # A model of another family: the tensor is named, and what was attached stays.
        other = tmp_path / "other.json"
        share = WeightShare.create_or_adopt(model_of("qwen3"), other, fused=True)
        said = asked_to_attach(trainer.layout, other)
        assert "q_norm" in str(said["error"]) or "bias" in str(said["error"]), said
        share.close(unlink=True)

        # Not laid out for fused projections.
        share = WeightShare.create_or_adopt(model_of("qwen2"), other)
        said = asked_to_attach(trainer.layout, other)
        assert said["error"] == "manifest: has no layout for fused projections"
        share.close(unlink=True)

        # Of another tokenizer.
        said = asked_to_attach(trainer.layout, trainer.layout.weights, "b" * 64)
        assert "tokenizer" in str(said["error"])

        # A copy of other weights: they would be written into the trainer's. vLLM is not even paused for it.
        url = f"unix:{trainer.layout.sockets / 'inference-vllm' / 'http'}"
        with pytest.raises(WeightsMismatchError, match="shared with a trainer"):
            SentWeights.create(model_of("qwen2", seed=3), url, tmp_path)

        # A segment whose owner is dead, and an address without a segment.
        with child(OWNER, str(other), "qwen2") as owner:
            assert owner.ended(START_S) == 0
        said = asked_to_attach(trainer.layout, other)
        assert "its owner is dead" in str(said["error"])
        left = WeightShare.open(other)
        left.close(unlink=True)
        said = asked_to_attach(trainer.layout, other)
        assert "gone" in str(said["error"])

        (choice,) = engine.complete()
        assert worst(trainer.model, choice) < EXACT

        # The supervisor is killed: vLLM goes with it, and the weights are only the trainer's.
        children = psutil.Process(engine.process.pid).children(recursive=True)
        assert len(children) >= 2, "the API server and the engine"
        assert {host for child in children for host in listening(child)} <= {"127.0.0.1", "::1"}
        engine.process.kill()
        engine.process.wait(END_S)
        until(lambda: not living(children))
        assert trainer.share.path.exists()

        # Another life comes back at the same address, with what the trainer has by then.
        trainer.step(0)
        again = Engine(trainer.layout)
        try:
            again.wait_ready()
            (choice,) = again.complete()
            assert choice["weight_versions"][0]["version"]["step"] == trainer.version.step
            assert worst(trainer.model, choice) < EXACT

            # vLLM itself is killed: its supervisor says so and ends, for whoever keeps it to start it again.
            children = psutil.Process(again.process.pid).children()
            os.kill(children[0].pid, signal.SIGKILL)
            assert again.process.wait(START_S) == 1
            log = (trainer.layout.root / "inference.log").read_text()
            assert "error: vLLM exited unexpectedly" in log.splitlines()[-1]
        finally:
            again.end()


@pytest.mark.parametrize("family", list(HALF))
def test_half_precision_keeps_its_budget_and_ends_in_order(tmp_path: Path, family: str) -> None:
    with lent(tmp_path / "run", family, torch.bfloat16) as (trainer, engine):
        found = []
        for seed in range(3):
            choices = engine.complete(n=8)
            found += [worst(trainer.model, choice) for choice in choices]
            assert choices[0]["weight_versions"][0]["version"]["step"] == trainer.version.step
            trainer.step(seed)
        assert max(found) < HALF[family], found
        # Another segment takes the place of the first: vLLM follows, and says which version it is.
        trainer.share.close(unlink=True)
        trainer.model = model_of(family, torch.bfloat16, seed=5)
        trainer.share = WeightShare.create_or_adopt(
            trainer.model,
            trainer.layout.weights,
            version=PolicyVersion(3, 9),
            fused=True,
            tokenizer=directory_fingerprint(trainer.layout.model),
        )
        until(lambda: engine.complete(max_tokens=1)[0]["weight_versions"][0]["version"]["incarnation"] == 3)
        (choice,) = engine.complete()
        assert worst(trainer.model, choice) < HALF[family]
        children = psutil.Process(engine.process.pid).children(recursive=True)
        assert engine.end() == 0
        until(lambda: not living(children))


STOPPED_WRITER = """
import mmap, os, signal, sys
from pathlib import Path
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.lock import WeightLock
address = segment_file.read_address(Path(sys.argv[1]))
segment = segment_file.open_existing(Path(address.path), address.nonce, writable=True)
memory = mmap.mmap(segment.fd, 0)
print("ready", flush=True)
sys.stdin.readline()
with WeightLock(memory, segment.fd).writing(PolicyVersion(0, 999)):
    os.kill(os.getpid(), signal.SIGSTOP)
os._exit(0)
"""
STALLED_S = 3.0


def health(engine: Engine) -> tuple[int, str]:
    status, said = engine.ask("GET", "/health")
    return status, said["status"]


def refuses(engine: Engine, why: str) -> None:
    assert health(engine) == (503, why)
    started = time.monotonic()
    assert engine.status() == 503
    assert time.monotonic() - started < 10.0, "nobody waits any more"


def is_exact(trainer: Lender, engine: Engine) -> bool:
    (choice,) = engine.complete()
    step = choice["weight_versions"][-1]["version"]["step"]
    return step == trainer.version.step and worst(trainer.model, choice) < EXACT


def test_whoever_is_stopped_hangs_no_request_and_is_asked_again(tmp_path: Path) -> None:
    """One start for all of it: a writer that is stopped with the lock, vLLM's engine, and vLLM's API server."""
    with lent(tmp_path / "run", "qwen2", stalled_s=STALLED_S) as (trainer, engine):
        with child(STOPPED_WRITER, str(trainer.layout.weights)) as writer:
            assert writer.line() == "ready"  # its start may take longer than the request
            with under_way(engine) as status:
                writer.order()
                assert status() == 503
                until(lambda: health(engine) == (503, "busy"))
                refuses(engine, "busy")
            writer.process.send_signal(signal.SIGCONT)
            assert writer.ended() == 0
        trainer.version = PolicyVersion(0, 999)
        until(lambda: health(engine) == (200, "ok"))
        assert is_exact(trainer, engine)

        children = psutil.Process(engine.process.pid).children(recursive=True)
        segment = trainer.share.path.name
        (core,) = [one for one in children if any(segment in each.path for each in one.memory_maps())]
        for stopped in (core, psutil.Process(engine.process.pid).children()[0]):
            with under_way(engine) as status:
                stopped.suspend()
                try:
                    assert status() == 503
                    refuses(engine, "stalled")
                finally:
                    stopped.resume()
            until(lambda: health(engine) == (200, "ok"))
            assert is_exact(trainer, engine)
        log = (trainer.layout.root / "inference.log").read_text()
        served = log[log.index(" serving ") :]  # on a busy machine the first step may take as long
        assert served.count("vllm stalled") == served.count("vllm recovered") == 2, log


SENDER = """
import os, signal, sys
from tests.services.inference.vllm.support.lent import model_of
from rolloutmq.schemas.files import RunLayout
from rolloutmq.trainer.weights.vllm_http import VllmSender
from pathlib import Path
layout = RunLayout(Path(sys.argv[1]))
sender = VllmSender.create(model_of("qwen2"), layout.weights, layout.vllm)
sender.supply()
sys.stdin.readline()
sender._sent._post("/pause?mode=keep", {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_vllm_has_of_a_sender_that_dies_is_answered_at_once(tmp_path: Path) -> None:
    """It dies right after the pause, so that the weights are whole: vLLM would keep what it has until it stalls."""
    lender = Lender(tmp_path / "run", "qwen2")  # what is in the run, without the weights
    lender.close()
    layout, model = lender.layout, model_of("qwen2")
    sent = lender.config.model_copy(update={"weights": WeightsConfig(backend="vllm_http")})
    layout.config.write_text(sent.model_dump_json())
    with child(SENDER, str(layout.root)) as sender:
        engine = Engine(layout)
        try:
            engine.wait_ready()
            with under_way(engine) as status:
                sender.order()
                assert sender.ended() == -signal.SIGKILL
                assert status() == 503
            refuses(engine, "torn")
            heir = VllmSender.create(model, layout.weights, layout.vllm, version=PolicyVersion(1, 0))
            heir.supply()
            until(lambda: health(engine) == (200, "ok"))
            (choice,) = engine.complete()
            assert choice["weight_versions"][0]["version"] == {"incarnation": 1, "step": 0}
            assert worst(model, choice) < EXACT
            heir.close(unlink=True)
        finally:
            engine.end()
