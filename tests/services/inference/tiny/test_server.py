"""The server over HTTP, with the trainer's side in this process; and once as the process of a run."""

import asyncio
import errno
import gc
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    AddressInUseError,
    ConfigError,
    PolicyRefusedError,
    WeightsMismatchError,
)
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.http_server.access import HttpAccess
from rolloutmq.services.http_server.listening import listening
from rolloutmq.services.inference.tiny.policy import ServedPolicy
from rolloutmq.services.inference.tiny.server import TinyServer, serve
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.trajectory import Trajectory, group_of
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.step.collate import Example, collate
from rolloutmq.trainer.step.logprobs import LogprobScorer
from rolloutmq.trainer.weights.address import read_disk
from rolloutmq.trainer.weights.disk import TENSORS, DiskShare
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare

V = PolicyVersion
DEADLINE_S = 60.0


class Trainer:
    """The trainer's side of a run: it shares weights and writes versions."""

    def __init__(self, run_dir: Path, config: RunConfig | None = None) -> None:
        self.config = config or RunConfig()
        self.layout = RunLayout(run_dir)
        self.layout.config.write_text(self.config.model_dump_json())
        self.policy: Any = None
        self._share: WeightShare | DiskShare | None = None

    def start(self, seed: int = 0, version: PolicyVersion = V()) -> None:
        self.policy = build_policy(self.config.model, seed)
        write_identity(self.policy, self.config.model, self.layout.model)
        create = DiskShare.create if self.config.weights.backend == "disk" else WeightShare.create_or_adopt
        tokenizer = directory_fingerprint(self.layout.model)
        self._share = create(self.policy, self.layout.weights, version=version, tokenizer=tokenizer)

    @property
    def share(self) -> WeightShare | DiskShare:
        assert self._share is not None
        return self._share

    def tear(self) -> None:
        with self.share.writing(V(0, 99)):
            raise InterruptedError

    def stop(self) -> None:
        if self._share is not None:
            self._share.close(unlink=True)
        self._share = self.policy = None
        gc.collect()


@pytest.fixture
def trainer(run_dir: Path) -> Any:
    made = Trainer(run_dir)
    yield made
    made.stop()


BACKENDS = ["posix_shm", "disk"]


@pytest.fixture
def of_backend(run_dir: Path, backend: str) -> Any:
    made = Trainer(run_dir, RunConfig.model_validate({"weights": {"backend": backend}}))
    yield made
    made.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process or task does to a file."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - a file is no event
            await asyncio.sleep(0.01)


class Client:
    """Asks the server of a run."""

    def __init__(self, layout: RunLayout, session: aiohttp.ClientSession, task: asyncio.Task[None]) -> None:
        self.layout = layout
        self.session = session
        self.task = task

    @property
    def url(self) -> str:
        address = read_json(self.layout.inference, InferenceAddress)
        assert address is not None
        return address.url

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(self.url + path, data=BytesIO(data)) as response:
            assert (response.status == 503) == ("Retry-After" in response.headers)
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> Any:
        body = {"prompt": "312=", "max_tokens": 4, "logprobs": 0, "return_token_ids": True, **fields}
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    async def version(self) -> Any:
        answer = await self.complete(max_tokens=1)
        return answer["choices"][0]["weight_versions"][0]["version"]


@asynccontextmanager
async def serving(trainer: Trainer) -> AsyncIterator[Client]:
    """Run the server until the block ends, then stop it in order."""
    stop = Stop()
    before = trainer.layout.inference.stat().st_mtime_ns if trainer.layout.inference.exists() else 0
    task = asyncio.create_task(serve(trainer.layout.root, stop))
    try:
        await until(
            lambda: (
                task.done()
                or (
                    trainer.layout.inference.exists()
                    and trainer.layout.inference.stat().st_mtime_ns != before
                )
            )
        )
        if task.done():
            task.result()
        async with aiohttp.ClientSession() as session:
            yield Client(trainer.layout, session, task)
    finally:
        stop.request("the test is over")
        await task


async def test_completions_are_sampled_from_the_shared_weights(trainer: Trainer) -> None:
    trainer.start(version=V(1, 7))
    async with serving(trainer) as client:
        answer = await client.complete(n=16, max_tokens=8, model="policy")
    assert len(answer["choices"]) == 16
    prompt = [1, 6, 4, 5, 13]  # <bos>, then the alphabet from 3 on
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["prompt_token_ids"] == prompt
        tokens = torch.tensor([prompt + choice["token_ids"]])
        with torch.no_grad():
            logits = trainer.policy(input_ids=tokens, use_cache=False).logits[0, 4:-1]
        expected = logits.log_softmax(-1).gather(-1, tokens[0, 5:, None]).squeeze(-1)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == 2 else "length")
        assert choice["weight_versions"] == [
            {"start": 0, "end": len(choice["token_ids"]), "version": {"incarnation": 1, "step": 7}}
        ]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 10


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_a_trainer_finds_what_was_sampled_as_likely_as_the_server_did(
    trainer: Trainer, temperature: float
) -> None:
    trainer.start()
    # So that the policy prefers something: an untrained one is as undecided at any temperature.
    with torch.no_grad(), trainer.share.writing(V(0, 1)):
        for parameter in trainer.policy.parameters():
            parameter.mul_(3)
    async with serving(trainer) as client:
        there = InferenceAddress(url=client.url, pid=0)
        async with OpenAIPolicy.opened(Engines(lambda: [there], random.Random(0))) as policy:
            sampled = await policy.complete("312=", n=16, max_tokens=8, temperature=temperature)
    group = group_of("g", [Trajectory.of(one, float(len(one.text))) for one in sampled])
    (one,) = collate([Example(group, np.ones(group.tokens, np.float32))], 1 << 20)
    scorer = LogprobScorer(trainer.policy, 1 << 20)
    found, _ = scorer(one.tokens, one.rows, one.positions, one.position_ids, temperatures=one.temperatures)
    torch.testing.assert_close(found.detach(), one.behaviour_logprobs, rtol=0, atol=2e-4)
    plain, _ = scorer(one.tokens, one.rows, one.positions, one.position_ids)
    assert (temperature == 1) == bool(torch.allclose(plain, one.behaviour_logprobs, atol=1e-2))


async def test_chat_goes_through_the_template(trainer: Trainer) -> None:
    trainer.start()
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "="}]
    messages = [{"role": "user", "content": "31"}, {"role": "user", "content": parts}]
    asked = {
        "messages": messages,
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
        "max_tokens": 4,
    }
    async with serving(trainer) as client:
        status, answer = await client.post("/v1/chat/completions", asked)
        same = await client.complete(temperature=0)
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        assert (await client.post("/v1/chat/completions", {"messages": picture}))[0] == 400
    assert status == 200
    (choice,) = answer["choices"]
    (expected,) = same["choices"]
    assert choice["prompt_token_ids"] == expected["prompt_token_ids"] == [1, 6, 4, 5, 13]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["message"] == {"role": "assistant", "content": expected["text"]}
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx(
        expected["logprobs"]["token_logprobs"], abs=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_new_version_is_served_at_once(of_backend: Trainer) -> None:
    trainer = of_backend
    trainer.start()
    async with serving(trainer) as client:
        before = await client.complete(temperature=0, max_tokens=1)
        with trainer.share.writing(V(0, 1)), torch.no_grad():
            trainer.policy.lm_head.weight.zero_()
        after = await client.complete(temperature=0, max_tokens=1)
        assert await client.get("/health") == (
            200,
            {"status": "ok", "version": {"incarnation": 0, "step": 1}},
        )
    uniform = -float(torch.tensor(32.0).log())
    assert after["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx([uniform])
    assert before["choices"][0]["logprobs"]["token_logprobs"] != pytest.approx([uniform])
    assert after["choices"][0]["weight_versions"][0]["version"] == {"incarnation": 0, "step": 1}


async def test_half_written_weights_are_never_sampled(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        with pytest.raises(InterruptedError):
            trainer.tear()
        for path in ("/v1/completions", "/v1/chat/completions"):
            field = {"prompt": "1="} if path == "/v1/completions" else {"messages": [{"content": "1="}]}
            status, answer = await client.post(path, field)
            assert status == 503
            assert "half-written since version 0.0" in answer["error"]["message"]
        status, answer = await client.get("/health")
        assert (status, answer["status"]) == (503, "torn")
        with trainer.share.writing(V(1, 0), restoring=True):
            pass
        assert await client.version() == {"incarnation": 1, "step": 0}
        assert (await client.get("/health"))[0] == 200


async def test_errors_are_those_of_openai(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        for body, status, says in [
            (b"{", 400, "invalid request"),
            (
                {"prompt": "3x="},
                400,
                "not in the vocabulary ('x'); add the characters of the prompt to model.alphabet",
            ),
            ({"prompt": [99]}, 400, "from 0 to 31"),
            ({"prompt": "1=", "model": "other"}, 404, "does not exist"),
            ({"prompt": "1=", "n": 513}, 400, "at most 512"),
            ({"prompt": "1=", "max_tokens": 126}, 400, "the context has 128 tokens"),
            (b" " * ((4 << 20) + 1), 413, "4194304 bytes"),
        ]:
            found, answer = await client.post("/v1/completions", body)
            assert found == status
            assert says in answer["error"]["message"]
            assert answer["error"]["type"] == "invalid_request_error"
        for path, status in [("/v1/nothing", 404), ("/v1/completions", 405)]:
            found, answer = await client.get(path)
            assert (found, set(answer)) == (status, {"error"})
        status, answer = await client.get("/v1/models")
        assert (status, answer["data"][0]["id"]) == (200, "policy")
        assert answer["data"][0]["root"] == str(trainer.layout.model.absolute())


async def test_it_serves_under_the_name_that_it_was_given(run_dir: Path) -> None:
    named = Trainer(run_dir, RunConfig.model_validate({"model": {"name": "apprentice"}}))
    named.start()
    try:
        async with serving(named) as client:
            status, answer = await client.get("/v1/models")
            assert (status, answer["data"][0]["id"]) == (200, "apprentice")
            assert (await client.complete(model="apprentice"))["model"] == "apprentice"
            assert (await client.post("/v1/completions", {"prompt": "1=", "model": "policy"}))[0] == 404
    finally:
        named.stop()


async def test_requests_at_once_are_generated_together(trainer: Trainer) -> None:
    trainer.start()
    async with serving(trainer) as client:
        answers = await asyncio.gather(
            *(client.complete(prompt=f"{digit}=", n=4, seed=digit) for digit in range(10) for _ in range(2))
        )
    for one, other in zip(answers[::2], answers[1::2], strict=True):
        assert [c["token_ids"] for c in one["choices"]] == [c["token_ids"] for c in other["choices"]]
    assert [answer["choices"][0]["prompt_token_ids"][1] for answer in answers[::2]] == list(range(3, 13))


async def test_it_starts_before_the_trainer_and_keeps_its_port(trainer: Trainer) -> None:
    async def start_later() -> None:
        await asyncio.sleep(0)
        trainer.start()

    later = asyncio.create_task(start_later())
    async with serving(trainer) as client:
        await later
        first = client.url
        assert await client.version() == {"incarnation": 0, "step": 0}
        address = read_json(trainer.layout.inference, InferenceAddress)
        assert address is not None
        assert address.pid == os.getpid()
    async with serving(trainer) as client:
        assert client.url == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(first.rsplit(":", 1)[1])))
        taken.listen()
        async with serving(trainer) as client:
            assert client.url != first
            await client.version()


async def test_it_can_be_stopped_while_it_waits(trainer: Trainer) -> None:
    stop = Stop()
    task = asyncio.create_task(serve(trainer.layout.root, stop))
    await asyncio.sleep(0)
    stop.request("the test is over")
    async with asyncio.timeout(DEADLINE_S):
        await task
    assert not trainer.layout.inference.exists()


async def test_it_waits_for_torn_weights_before_it_says_where_it_is(trainer: Trainer) -> None:
    trainer.start()
    with pytest.raises(InterruptedError):
        trainer.tear()
    stop = Stop()
    task = asyncio.create_task(serve(trainer.layout.root, stop))
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done
    assert not trainer.layout.inference.exists()
    with trainer.share.writing(V(1, 0), restoring=True):
        pass
    await until(trainer.layout.inference.exists)
    stop.request("the test is over")
    await task


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("backend", ["disk"])
@pytest.mark.parametrize("harm", [cut, Path.unlink])
async def test_a_damaged_version_is_refused_until_there_is_a_newer_one(
    of_backend: Trainer, harm: Callable[[Path], None]
) -> None:
    trainer = of_backend
    trainer.start()
    async with serving(trainer) as client:
        with trainer.share.writing(V(0, 1)):
            pass
        harm(newest_file(trainer.layout))
        status, answer = await client.post("/v1/completions", {"prompt": "1="})
        assert status == 503
        assert "are damaged" in answer["error"]["message"]
        status, answer = await client.get("/health")
        assert (status, answer["status"]) == (503, "torn")
        with trainer.share.writing(V(0, 2)):
            pass
        assert await client.version() == {"incarnation": 0, "step": 2}
        assert (await client.get("/health"))[0] == 200


@pytest.mark.parametrize("backend", ["disk"])
async def test_it_does_not_begin_with_a_damaged_version(of_backend: Trainer) -> None:
    trainer = of_backend
    trainer.start()
    cut(newest_file(trainer.layout))
    assert ServedPolicy.attach(trainer.layout, max_rows=4, seed=0) is None
    with trainer.share.writing(V(0, 1)):
        pass
    served = ServedPolicy.attach(trainer.layout, max_rows=4, seed=0)
    assert served is not None
    assert served.version == V(0, 1)
    served.close()


@pytest.mark.parametrize("backend", ["disk"])
async def test_a_server_that_waits_for_a_whole_version_says_so_once(
    of_backend: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, stop, tried = of_backend, Stop(), list[bool]()
    trainer.start()
    cut(newest_file(trainer.layout))
    attach = ServedPolicy.attach

    def counted(*given: Any, **named: Any) -> ServedPolicy | None:
        tried.append(True)
        return attach(*given, **named)

    monkeypatch.setattr(ServedPolicy, "attach", counted)
    task = asyncio.create_task(serve(trainer.layout.root, stop))
    await until(lambda: len(tried) > 3)
    stop.request("the test is over")
    await task
    assert caplog.text.count("the weights are damaged") == 1


def newest_file(layout: RunLayout) -> Path:
    found = read_disk(layout.weights)
    assert found is not None
    return layout.versions / found.directory / TENSORS


@pytest.mark.parametrize("backend", ["disk"])
async def test_another_model_of_a_living_trainer_ends_it_and_of_a_dead_one_does_not(
    of_backend: Trainer,
) -> None:
    trainer = of_backend
    trainer.start()
    config = json.loads((trainer.layout.model / "config.json").read_bytes())
    config["rms_norm_eps"] = 1e-3
    (trainer.layout.model / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsMismatchError, match="rms_norm_eps"):
        ServedPolicy.attach(trainer.layout, max_rows=4, seed=0)
    trainer.share.close()
    assert ServedPolicy.attach(trainer.layout, max_rows=4, seed=0) is None


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_weights_of_another_way_are_waited_out(of_backend: Trainer, backend: str) -> None:
    """As after a run was resumed with another backend: what lies there is of the life before."""
    trainer = of_backend
    trainer.start()
    (other,) = set(BACKENDS) - {backend}
    changed = RunConfig.model_validate({"weights": {"backend": other}})
    trainer.layout.config.write_text(changed.model_dump_json())
    assert ServedPolicy.attach(trainer.layout, max_rows=4, seed=0) is None


async def test_want_of_descriptors_costs_a_look_for_weights_and_not_the_engine(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, looks = Trainer(run_dir), 0
    seen = asyncio.Event()

    def short(_: ServedPolicy) -> bool:
        nonlocal looks
        looks += 1
        if looks > 2:
            seen.set()
            return False
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ServedPolicy, "is_replaced", short)
    trainer.start()
    try:
        async with serving(trainer) as client, asyncio.timeout(DEADLINE_S):
            await seen.wait()
            assert await client.version() == {"incarnation": 0, "step": 0}
    finally:
        trainer.stop()
    assert caplog.text.count("weights not looked for") == 1
    caplog.clear()  # its error keeps the frames, and with them the weights


@pytest.mark.parametrize("backend", BACKENDS)
async def test_another_life_of_the_trainer_is_followed(of_backend: Trainer) -> None:
    trainer = of_backend
    trainer.start()
    async with serving(trainer) as client:
        trainer.stop()
        assert await client.version() == {"incarnation": 0, "step": 0}  # what it has is still good
        trainer.start(seed=1, version=V(1, 5))
        async with asyncio.timeout(DEADLINE_S):
            while (version := await client.version()) == {"incarnation": 0, "step": 0}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert version == {"incarnation": 1, "step": 5}
        answer = await client.complete(temperature=0, max_tokens=1)
        with torch.no_grad():
            logits = trainer.policy(input_ids=torch.tensor([[1, 6, 4, 5, 13]])).logits[0, -1]
        assert answer["choices"][0]["token_ids"] == [int(logits.argmax())]


async def test_a_taken_port_and_an_external_server_are_said(run_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        trainer = Trainer(run_dir, RunConfig(inference=InferenceConfig(port=port)))
        trainer.start()
        try:
            with pytest.raises(ExceptionGroup) as caught:
                await serve(run_dir, Stop())
            assert caught.group_contains(AddressInUseError, match=str(port))
        finally:
            trainer.stop()
    Trainer(run_dir, RunConfig(inference=InferenceConfig(kind="external", url="http://127.0.0.1:1/v1")))
    with pytest.raises(ConfigError, match=r"inference\.kind"):
        await serve(run_dir, Stop())


async def test_a_token_lets_the_workers_in_and_nobody_else(run_dir: Path) -> None:
    token = run_dir / "token"
    write_private(token, b"0123456789abcdef")
    trainer = Trainer(run_dir, RunConfig.model_validate({"run": {"http_token_file": str(token)}}))
    trainer.start()
    try:
        async with serving(trainer) as client:
            assert (await client.get("/health"))[0] == 401
            engines = Engines(lambda: [InferenceAddress(url=client.url, pid=0)], random.Random(0))
            async with OpenAIPolicy.opened(engines, token=lambda _: "0123456789abcdef") as policy:
                assert len(await policy.complete("1=", n=2, max_tokens=1)) == 2
                async with (
                    policy.endpoint() as endpoint,
                    client.session.get(f"{endpoint.base_url}/models") as answer,
                ):
                    assert answer.status == 200
            async with OpenAIPolicy.opened(engines) as stranger:
                with pytest.raises(PolicyRefusedError, match="authorization"):
                    await stranger.complete("1=")
    finally:
        trainer.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "1="}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {}}'),
    ],
)
async def test_a_client_that_hangs_up_takes_its_request_along(
    trainer: Trainer, path: str, body: bytes
) -> None:
    trainer.start()
    served = ServedPolicy.attach(trainer.layout, max_rows=8, seed=0)
    assert served is not None
    server = TinyServer(served, trainer.config.inference)
    async with server.batcher, listening(server.app(HttpAccess()), "127.0.0.1", 0, None) as port:
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(f"http://127.0.0.1:{port}{path}", data=body))
            await until(lambda: len(server.batcher._waiting) == 1)  # nobody runs the batcher
            asked.cancel()
            await asyncio.wait([asked])
        await until(lambda: not server.batcher._waiting)
        assert not server.batcher._futures
    served.close()


async def start_process(run_dir: Path) -> asyncio.subprocess.Process:
    """Start the server as a run does."""
    arguments = ["-m", "rolloutmq.launch.cli", "inference", "--run-dir", str(run_dir)]
    with (run_dir / "inference.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log
        )


def address_of(layout: RunLayout, process: asyncio.subprocess.Process) -> str | None:
    """Return where this process serves, once it says so."""
    address = read_json(layout.inference, InferenceAddress)
    return address.url if address and address.pid == process.pid else None


@pytest.mark.extended
async def test_the_process_comes_back_where_it_was(trainer: Trainer) -> None:
    """Killed, it serves at the same address again; asked to end, it ends with 0."""
    trainer.start()
    layout = trainer.layout
    first = await start_process(layout.root)
    second = None
    try:
        await until(lambda: address_of(layout, first) is not None)
        before = address_of(layout, first)
        first.kill()
        await first.wait()
        second = await start_process(layout.root)
        await until(lambda: address_of(layout, second) is not None)
        assert address_of(layout, second) == before
        second.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await second.wait() == 0
    finally:
        for process in (first, second):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
