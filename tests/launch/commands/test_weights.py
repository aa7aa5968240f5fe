"""The ladder on a run that lives: a trainer in a process of its own, a server in this one, the doctor beside them."""

import asyncio
import gc
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.launch.commands import weights
from rolloutmq.launch.commands.doctor import Finding
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import InferenceAddress, RunLayout, SentAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.tiny.server import serve
from rolloutmq.services.process.runner import Stop
from rolloutmq.trainer.policy.model import build_policy

DEADLINE_S = 120.0
TRAINER = """
import sys, time
from pathlib import Path
import torch
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.weights.backends import owned
config, layout = load_run(Path(sys.argv[1]))
policy = build_policy(config.model, 0)
write_identity(policy, config.model, layout.model)
with owned(policy, config, layout, PolicyVersion()) as share:
    print("ready", flush=True)
    step, pause = 0, float(sys.argv[2])
    while pause:
        step += 1
        with share.writing(PolicyVersion(0, step)), torch.no_grad():
            policy.lm_head.weight.mul_(1.001)
        time.sleep(pause)
    sys.stdin.read()
"""


@pytest.fixture
def layout(run_dir: Path) -> Iterator[RunLayout]:
    found = RunLayout(run_dir)
    found.config.write_text(RunConfig().model_dump_json())
    yield found
    gc.collect()  # what the server had mapped in this process
    segment_file.sweep(found.weights)


def trainer(layout: RunLayout, pause_s: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", TRAINER, str(layout.root), str(pause_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def training(layout: RunLayout) -> Iterator["subprocess.Popen[str]"]:
    with trainer(layout, 0.25) as process:
        yield process
        process.kill()


@pytest.fixture
def idle(layout: RunLayout) -> Iterator["subprocess.Popen[str]"]:
    with trainer(layout, 0.0) as process:
        yield process
        process.kill()


@asynccontextmanager
async def serving(layout: RunLayout) -> AsyncIterator[None]:
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not layout.inference.exists():
                assert not task.done()
                await asyncio.sleep(0.02)
        yield
    finally:
        stop.request("the test is over")
        await task


def configure(layout: RunLayout, backend: str) -> None:
    config = RunConfig.model_validate({"weights": {"backend": backend}})
    layout.config.write_text(config.model_dump_json())


@pytest.mark.parametrize("backend", ["posix_shm", pytest.param("disk", marks=pytest.mark.extended)])
async def test_every_rung_holds_on_a_run_that_trains(
    request: pytest.FixtureRequest, layout: RunLayout, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    configure(layout, backend)
    request.getfixturevalue("training")
    async with serving(layout):
        code = await asyncio.to_thread(weights.report, layout.root, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [one["what"] for one in found] == ["manifest", "aliasing", "nonce", "digests", "served"]
    assert all(one["fine"] for one in found), found
    assert ("files of its version" in found[1]["found"]) == (backend == "disk")
    assert code == 0


@pytest.mark.extended
@pytest.mark.usefixtures("idle")
def test_a_trainer_that_takes_no_step_is_no_proof(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights, "ANSWER_PATIENCE_S", 0.05)
    assert weights.report(layout.root, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok      manifest: ")
    assert lines[2].startswith("MISSING nonce: the owner did not answer within")
    assert lines[4] == "advice  served: no inference server; start one"


def test_a_run_without_weights(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert weights.report(layout.root, as_json=False) == 1
    assert capsys.readouterr().out.startswith("MISSING manifest: ")


class Stamping(http.server.BaseHTTPRequestHandler):
    """A server that stamps what it continues with one version."""

    version = PolicyVersion(1, 7)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        spans = [{"start": 0, "end": 4, "version": {"incarnation": 1, "step": self.version.step}}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"weight_versions": spans}]}).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def stamping(layout: RunLayout) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stamping)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    write_json(layout.inference, InferenceAddress(url=url, pid=1))
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def told_of(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    code = weights.report(layout.root, as_json=True)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("stamping")
def test_of_weights_that_are_sent_it_says_what_arrived_and_what_is_sampled(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    me = segment_file.SegmentOwner.current()
    write_json(layout.weights, SentAddress(sender=me, version=PolicyVersion(1, 7)))
    code, found = told_of(layout, capsys)
    assert (code, [one["fine"] for one in found]) == (0, [True] * 3)
    assert found[0]["found"].startswith("not mapped")
    assert f"trainer {me.pid} lives, vLLM has version 1.7" in found[1]["found"]
    assert "version 1.7" in found[2]["found"]

    monkeypatch.setattr(weights, "ATTEMPTS", 2)
    write_json(layout.weights, SentAddress(sender=me, version=PolicyVersion(1, 8)))
    _, found = told_of(layout, capsys)
    assert not found[2]["fine"]
    assert "never sampled from the version last sent in 2 attempts, but from 1.7" in found[2]["found"]

    write_json(layout.weights, SentAddress(sender=(me.pid, me.start_ticks - 1, me.namespace), version=None))
    code, found = told_of(layout, capsys)
    assert code == 1
    assert "is dead, vLLM has received no weights yet" in found[1]["found"]


def answered(policy: Any, shift: float) -> Finding:
    choice = {"token_ids": [3, 4], "logprobs": {"token_logprobs": [0.0, 0.0]}}
    first = weights._compared(policy, choice, PolicyVersion(1, 2))
    assert not first.fine
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([[*weights.PROMPT, 3]]), use_cache=False).logits[0]
    spread = logits.log_softmax(-1)[len(weights.PROMPT) - 1 :]
    choice["logprobs"] = {"token_logprobs": [float(spread[0, 3]), float(spread[1, 4]) + shift]}
    return weights._compared(policy, choice, PolicyVersion(1, 2))


def test_a_server_with_other_weights_is_told() -> None:
    policy = build_policy(RunConfig().model, 0)
    assert answered(policy, 0.0).fine
    found = answered(policy, 0.01)
    assert not found.fine
    assert "version 1.2 differ by at most 1.0e-02" in found.found
