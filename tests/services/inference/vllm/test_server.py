"""The engine around a simulated vLLM: responses to workers, and the end of the process."""

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from rolloutmq.bus.rundir import FILE_POLL_S, read_json, write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, WeightsMismatchError
from rolloutmq.schemas.files import InferenceAddress, RunLayout, SentAddress, VllmAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.vllm import policy as policies
from rolloutmq.services.inference.vllm import server
from rolloutmq.services.inference.vllm.process import VllmEndedError
from rolloutmq.services.inference.vllm.server import serve
from rolloutmq.services.process.runner import Stop
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.weights.posix_shm import WeightShare

V = PolicyVersion
DEADLINE_S = 120.0
DEAD = (os.getpid(), 1, segment_file.SegmentOwner.current().namespace)
"""A sender who was there before this process had its number."""
PYTHON = """#!/bin/sh
PYTHONPATH="$PYTHONPATH:{site}" exec {python} "$@"
"""


@pytest.fixture
def layout(run_dir: Path) -> Iterator[RunLayout]:
    """A run whose trainer shares its weights, and an environment with a vLLM that is made up."""
    site = run_dir / "env" / "lib" / "python3.11" / "site-packages"
    package = site / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (site / "vllm", site / "vllm" / "entrypoints", package):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text((Path(__file__).parent / "support" / "fake_server.py").read_text())
    python = run_dir / "env" / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.format(site=site, python=sys.executable))
    python.chmod(0o755)
    found = RunLayout(run_dir)
    configure(found)
    config = RunConfig()
    policy = build_policy(config.model, 0)
    write_identity(policy, config.model, found.model)
    share = WeightShare.create_or_adopt(policy, found.weights, version=V(1, 2), fused=True)
    found.share = share  # type: ignore[attr-defined]
    yield found
    found.share.close(unlink=True)  # type: ignore[attr-defined]


def configure(layout: RunLayout, backend: str = "posix_shm", **settings: Any) -> None:
    vllm = {"python": str(layout.root / "env/bin/python"), "start_s": DEADLINE_S, **settings}
    config = {
        "run": {"dir": str(layout.root)},
        "inference": {"kind": "vllm", "max_batch": 16, "vllm": vllm},
        "weights": {"backend": backend},
    }
    layout.config.write_text(RunConfig.model_validate(config).model_dump_json())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process or task does to a file."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - a file is no event
            await asyncio.sleep(0.01)


class Client:
    """Asks the engine of a run."""

    def __init__(self, layout: RunLayout, session: aiohttp.ClientSession) -> None:
        self.layout = layout
        self.session = session
        self.draining = asyncio.Event()
        self.stop = Stop()
        self.task: asyncio.Task[None]

    @property
    def address(self) -> InferenceAddress:
        found = read_json(self.layout.inference, InferenceAddress)
        assert found is not None
        return found

    async def ask(self, prompt: Any, **more: Any) -> tuple[int, Any]:
        body = {"prompt": prompt, "max_tokens": 3, "logprobs": 0, "return_token_ids": True, **more}
        async with self.session.post(
            self.address.url + "/v1/completions", data=msgspec.json.encode(body)
        ) as reply:
            assert (reply.status == 503) == ("Retry-After" in reply.headers)
            return reply.status, await reply.json()

    async def health(self) -> tuple[int, str]:
        async with self.session.get(self.address.url + "/health") as reply:
            return reply.status, (await reply.json())["status"]


@asynccontextmanager
async def serving(layout: RunLayout) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        client = Client(layout, session)
        client.task = asyncio.create_task(serve(layout.root, client.stop, draining=client.draining))
        try:
            await until(lambda: client.task.done() or layout.inference.exists())
            yield client
        finally:
            client.stop.request("the test is over")
            await asyncio.wait([client.task])


async def test_workers_get_tokens_logprobs_and_versions(layout: RunLayout) -> None:
    async with serving(layout) as client:
        status, answer = await client.ask([[3, 4], [4, 4]], n=2)
        assert status == 200
        told = [
            (c["token_ids"], c["logprobs"]["token_logprobs"], c["prompt_token_ids"])
            for c in answer["choices"]
        ]
        assert told == [
            ([3, 3, 3], [-3.0] * 3, [3, 4]),
            ([4, 4, 4], [-3.0] * 3, [3, 4]),
            ([3, 3, 3], [-4.0] * 3, [4, 4]),
            ([4, 4, 4], [-4.0] * 3, [4, 4]),
        ]
        version = {"incarnation": 1, "step": 2}
        assert answer["choices"][0]["weight_versions"] == [{"start": 0, "end": 3, "version": version}]
        assert await client.health() == (200, "ok")
        assert (await client.ask([3], top_k=4))[0] == 400
        assert (await client.ask([77]))[0] == 400
    await client.task


async def test_tokens_go_in_and_out_without_a_text(layout: RunLayout) -> None:
    async with serving(layout) as client:
        for more, sampled, finish, stop in [
            ({}, [3, 3, 3], "length", None),
            ({"stop_token_ids": [3]}, [3], "stop", 3),
        ]:
            asked = {"token_ids": [5, 4], "sampling_params": {"max_tokens": 3, "logprobs": 1, **more}}
            async with client.session.post(
                client.address.url + "/inference/v1/generate", json=asked
            ) as reply:
                (choice,) = (await reply.json())["choices"]
            assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (
                sampled,
                finish,
                stop,
            )
            assert [one["token"] for one in choice["logprobs"]["content"]] == ["token_id:3"] * len(sampled)
            version = {"incarnation": 1, "step": 2}
            assert choice["weight_versions"] == [{"start": 0, "end": len(sampled), "version": version}]
    await client.task


async def test_half_written_weights_are_refused_until_they_are_restored(layout: RunLayout) -> None:
    share = layout.share  # type: ignore[attr-defined]
    async with serving(layout) as client:
        with pytest.raises(InterruptedError), share.writing(V(1, 3)):
            raise InterruptedError
        assert (await client.ask([3]))[0] == 503
        assert await client.health() == (503, "torn")
        with share.writing(V(1, 4), restoring=True):
            pass
        _, answer = await client.ask([3])
        assert answer["choices"][0]["weight_versions"][0]["version"] == {"incarnation": 1, "step": 4}
        # What vLLM ended is to be asked again.
        status, answer = await client.ask([7])
        assert (status, answer["error"]["code"]) == (503, "unavailable")


@pytest.mark.extended
async def test_a_writer_that_stops_in_mid_write_is_not_waited_for(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "KEPT_S", 0.3)
    share = layout.share  # type: ignore[attr-defined]
    async with serving(layout) as client:
        with share.writing(V(1, 3)):
            await until_health(client, (503, "busy"))
            status, answer = await client.ask([3])
            assert status == 503
            assert f"writer {os.getpid()} holds it" in answer["error"]["message"]
        assert await client.health() == (200, "ok")
        assert (await client.ask([3]))[0] == 200


async def test_it_serves_what_was_sent_once_it_is_whole(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM that has nothing yet says where it is, and is waited for; one that stays paused is torn, what it has too.

    If its sender lives that takes a while, if it is dead it is known at once.
    """
    configure(layout, "vllm_http")
    sent = layout.root / "sent"
    monkeypatch.setenv("FAKE_VLLM_SENT", str(sent))
    layout.share.close(unlink=True)  # type: ignore[attr-defined]
    # A trainer that is dead has no `model/` that anybody may rely on.
    write_json(layout.weights, SentAddress(sender=DEAD))
    async with aiohttp.ClientSession() as session:
        client = Client(layout, session)
        client.task = asyncio.create_task(serve(layout.root, client.stop, draining=client.draining))
        try:
            await asyncio.sleep(2 * FILE_POLL_S)
            assert not (layout.sockets / "inference-vllm").exists()
            write_json(layout.weights, SentAddress(sender=segment_file.SegmentOwner.current()))
            await until(layout.vllm.exists)
            address = read_json(layout.vllm, VllmAddress)
            assert address is not None
            assert address.url == f"unix:{layout.sockets / 'inference-vllm' / 'http'}"
            assert not layout.inference.exists()
            sent.write_text("2.5")
            await until(layout.inference.exists)
            _, answer = await client.ask([3])
            version = answer["choices"][0]["weight_versions"][0]["version"]
            assert version == {"incarnation": 2, "step": 5}
            for patience_s, sender in ((0.3, segment_file.SegmentOwner.current()), (1000.0, DEAD)):
                monkeypatch.setattr(policies, "KEPT_S", patience_s)
                asked = asyncio.create_task(client.ask([6]))  # vLLM has it, and never answers
                await until(lambda: client.address.in_hand == 1)
                write_json(layout.weights, SentAddress(sender=sender))
                sent.write_text("")  # a transfer that nobody ends
                await until_health(client, (503, "torn"))
                for status, answer in (await asked, await client.ask([3])):
                    assert status == 503
                    assert "half-written since version" in answer["error"]["message"]
                write_json(layout.weights, SentAddress(sender=segment_file.SegmentOwner.current()))
                sent.write_text("3.0")
                await until_health(client, (200, "ok"))
            _, answer = await client.ask([3])
            assert answer["choices"][0]["weight_versions"][0]["version"]["incarnation"] == 3
        finally:
            client.stop.request("the test is over")
            await asyncio.wait([client.task])
    client.task.result()


async def until_health(client: Client, wanted: tuple[int, str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await client.health()) != wanted:  # noqa: ASYNC110 - it is asked from outside
            await asyncio.sleep(0.01)


def another_segment(layout: RunLayout) -> None:
    share = layout.share  # type: ignore[attr-defined]
    share.close(unlink=True)
    layout.share = WeightShare.create_or_adopt(  # type: ignore[attr-defined]
        build_policy(RunConfig().model, 0), layout.weights, version=V(7, 0), fused=True
    )


async def test_another_segment_is_followed(layout: RunLayout) -> None:
    async with serving(layout) as client:
        another_segment(layout)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                _, answer = await client.ask([3])
                if answer["choices"][0]["weight_versions"][0]["version"]["incarnation"] == 7:
                    break
        assert await client.health() == (200, "ok")


@pytest.mark.extended
async def test_another_segment_that_does_not_fit_ends_the_engine(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_REFUSES_ANOTHER", "1")
    async with serving(layout) as client:
        another_segment(layout)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(WeightsMismatchError, match="tokenizer: it is another"):
                await asyncio.shield(client.task)


@pytest.mark.extended
async def test_what_fails_while_it_watches_ends_the_engine(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_self: WeightShare) -> bool:
        raise ValueError("the address is damaged")

    async with serving(layout) as client:
        monkeypatch.setattr(WeightShare, "is_replaced", fails)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ValueError, match="is damaged"):
                await asyncio.shield(client.task)
        monkeypatch.undo()


async def test_a_look_that_the_system_refuses_is_repeated(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()

    def refused(_self: WeightShare) -> bool:
        looked.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with serving(layout) as client:
        with monkeypatch.context() as without_descriptors:
            without_descriptors.setattr(WeightShare, "is_replaced", refused)
            async with asyncio.timeout(DEADLINE_S):
                await looked.wait()
                await client.ask([8])


@pytest.mark.parametrize("where", ["health", "attach"])
async def test_a_vllm_that_listens_and_hangs_is_given_up(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM_HANGS", where)
    configure(layout, start_s=3.0, grace_s=0.2)
    async with serving(layout) as client:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(VllmEndedError, match="did not start within"):
                await asyncio.shield(client.task)


@pytest.mark.parametrize("where", ["health", "attach"])
async def test_a_vllm_that_hangs_does_not_keep_the_engine_from_going(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM_HANGS", where)
    configure(layout, grace_s=0.2)
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    await until((layout.sockets / "inference-vllm" / "http").exists)
    await asyncio.sleep(2 * server.READY_POLL_S)  # it asks by then; stopped before that it would end anyway
    stop.request("it is enough")
    async with asyncio.timeout(DEADLINE_S / 3):
        await task


@pytest.mark.extended
async def test_a_request_that_is_lost_is_answered_and_costs_no_other(layout: RunLayout) -> None:
    configure(layout, stalled_s=0.3)
    async with serving(layout) as client, asyncio.timeout(DEADLINE_S):
        status, answer = await client.ask([6])
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert "vLLM is stalled: no step and no response" in answer["error"]["message"]
        while await client.health() != (200, "ok"):  # noqa: ASYNC110 - it is asked from outside
            await asyncio.sleep(0.01)
        assert (await client.ask([3]))[0] == 200


@pytest.mark.extended
async def test_one_that_takes_steps_is_waited_for(layout: RunLayout) -> None:
    configure(layout, stalled_s=0.3)
    async with serving(layout) as client:
        asking = asyncio.create_task(client.ask([9]))
        done, _ = await asyncio.wait([asking], timeout=1.5)  # five times as long as it may stand still
        assert not done
        assert await client.health() == (200, "ok")
        asking.cancel()
        await asyncio.wait([asking])


@pytest.mark.extended
async def test_a_vllm_that_is_stopped_is_told_and_asked_again_when_it_goes_on(layout: RunLayout) -> None:
    configure(layout, stalled_s=1.5)
    before = psutil.Process().children()
    async with serving(layout) as client, asyncio.timeout(DEADLINE_S):
        (vllm,) = [one for one in psutil.Process().children() if one not in before]
        asked = [asyncio.create_task(client.ask([9])) for _ in range(3)]
        await until(lambda: client.address.in_hand == 3)
        vllm.suspend()
        try:
            for status, answer in await asyncio.gather(*asked):
                assert status == 503
                assert "is stalled" in answer["error"]["message"]
            assert await client.health() == (503, "stalled")
            await until(lambda: client.address.trouble == "stalled")
            started = time.monotonic()
            assert (await client.ask([3]))[0] == 503
            assert time.monotonic() - started < 5.0, "nobody waits for it any more"
        finally:
            vllm.resume()
        while await client.health() != (200, "ok"):  # noqa: ASYNC110 - it is asked from outside
            await asyncio.sleep(0.01)
        assert (await client.ask([3]))[0] == 200


@pytest.mark.extended
async def test_its_directory_goes_with_it_and_belongs_to_one(layout: RunLayout) -> None:
    directory = layout.sockets / "inference-vllm"
    async with serving(layout) as client:
        assert (directory / "http").exists()
        with pytest.raises(AddressInUseError, match="another engine of that name"):
            await serve(layout.root, Stop())
        assert (await client.ask([3]))[0] == 200
    await client.task
    assert not directory.exists()


async def test_it_drains(layout: RunLayout) -> None:
    async with serving(layout) as client:
        slow = asyncio.create_task(client.ask([5]))
        await until(lambda: client.address.in_hand == 1)
        client.draining.set()
        await until(lambda: client.address.draining)
        assert (await client.ask([3]))[0] == 503
        assert (await slow)[0] == 200
        await client.task


@pytest.mark.extended
async def test_who_goes_away_is_not_waited_for(layout: RunLayout) -> None:
    async with serving(layout) as client:
        gone = asyncio.create_task(client.ask([6]))
        await until(lambda: client.address.in_hand == 1)
        gone.cancel()
        await until(lambda: client.address.in_hand == 0)


async def test_a_vllm_that_dies_ends_the_engine_with_its_last_words(layout: RunLayout) -> None:
    async with serving(layout) as client:
        asking = asyncio.create_task(client.ask([8]))
        with pytest.raises(VllmEndedError, match="exited unexpectedly"):
            await client.task
        await asyncio.wait([asking])
        assert not isinstance(asking.exception(), AssertionError)


@pytest.mark.extended
async def test_weights_that_do_not_fit_are_said(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_REFUSAL", "model.norm.weight: shape is (3,) in the segment")
    async with serving(layout) as client:
        with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight: shape"):
            await client.task


async def test_a_vllm_that_does_not_come_up_is_given_up(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_SLOW", "1")
    configure(layout, start_s=0.5)
    async with serving(layout) as client:
        with pytest.raises(VllmEndedError, match="did not start within"):
            await client.task


@pytest.mark.extended
async def test_a_vllm_that_does_not_end_is_killed(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_DEAF", "1")
    configure(layout, grace_s=0.2)
    before = psutil.Process().children()
    async with serving(layout) as client:
        children = [one for one in psutil.Process().children() if one not in before]
        assert children
    await client.task
    assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


async def test_without_vllm_nothing_is_started(layout: RunLayout) -> None:
    configure(layout, python="/nowhere/bin/python")
    with pytest.raises(ConfigError, match=r"make \.venv-vllm"):
        await serve(layout.root, Stop())


async def test_a_killed_engine_takes_its_vllm_along(layout: RunLayout) -> None:
    with (layout.root / "inference.log").open("ab") as log:
        engine = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rolloutmq.launch.cli", "inference", "--run-dir", str(layout.root)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=log,
        )
    await until(layout.inference.exists)
    children = psutil.Process(engine.pid).children(recursive=True)
    assert children
    engine.send_signal(signal.SIGKILL)
    await engine.wait()
    await until(
        lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children)
    )
