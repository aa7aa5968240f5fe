"""The teacher over HTTP, called by the workers' client; and as the process of a run."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from tests.trainer.support.saved import save_model
from yarl import URL

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.tokenizer_fingerprint import fingerprint
from rolloutmq.schemas.config.distillation import TeacherConfig
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.errors import ConfigError, TokenizerMismatchError, VocabularyMismatchError
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.distillation import IDS_COLUMN, LOGPROBS_COLUMN, TEACH_PATH
from rolloutmq.services.inference import server as model_server
from rolloutmq.services.inference.teacher.server import serve
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.worker.teacher_client import TeacherClient
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.policy.tokenizer import write_tokenizer

DEADLINE_S = 120.0
"""A process that imports torch takes seconds, on a busy machine many."""
SMALL: dict[str, Any] = {"hidden_size": 16, "mlp_size": 16, "max_positions": 16}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), 5, **SMALL)


def run_of(layout: RunLayout, teacher: dict[str, Any], **distillation: Any) -> RunConfig:
    told = {"kind": "top_k", "top_k": 4} | distillation
    config = RunConfig.model_validate(
        {"teacher": {"retry_s": 0.05} | teacher, "trainer": {"distillation": told}, "model": SMALL}
    )
    layout.config.write_text(config.model_dump_json())
    layout.model.mkdir(exist_ok=True)
    write_tokenizer(config.model, layout.model)
    return config


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


async def address(layout: RunLayout) -> InferenceAddress:
    async with asyncio.timeout(DEADLINE_S):
        while (found := read_json(layout.teacher, InferenceAddress)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


@pytest.fixture
async def served(layout: RunLayout, model_dir: Path) -> AsyncIterator[RunConfig]:
    config = run_of(layout, {"path": str(model_dir), "name": "sage"})
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    await address(layout)
    yield config
    stop.request("the end of the test")
    await task


def some_group(lengths: tuple[int, ...] = (6, 3, 8), **columns: Any) -> Group:
    rng = np.random.default_rng(0)
    return Group.build(
        "g",
        tokens=[rng.integers(0, 15, n).astype(np.int32) for n in lengths],
        mask=[np.arange(n) >= n // 2 for n in lengths],
        scores=[0.0] * len(lengths),
        inference_logprobs=[np.zeros(n) for n in lengths],
        **columns,
    )


async def test_a_group_comes_back_with_what_the_teacher_says(
    layout: RunLayout, served: RunConfig, model_dir: Path
) -> None:
    model: Any = build_policy(ModelConfig(path=str(model_dir)), 0)
    async with TeacherClient.opened(served, layout) as teacher:
        group = await teacher.teach(some_group())
        assert teacher.wait(0.0) == ""
    for tokens, mask, ids, told in zip(
        group["tokens"], group["mask"], group[IDS_COLUMN], group[LOGPROBS_COLUMN], strict=True
    ):
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(tokens[None].astype(np.int64))).logits[0]
        best = logits.log_softmax(-1).topk(4, -1)
        for place, trained in enumerate(mask):
            if trained:
                assert ids[place].tolist() == best.indices[place - 1].tolist()
                np.testing.assert_allclose(told[place], best.values[place - 1], atol=1e-5)
            else:
                assert not len(ids[place])


@pytest.mark.usefixtures("served")
async def test_a_body_that_stops_is_not_waited_for(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_server, "BODY_S", 0.1)
    url = URL((await address(layout)).url)
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            f"POST {url.path.rstrip('/')}{TEACH_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n\x80".encode()
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_a_group_larger_than_a_request_is_asked_in_parts(layout: RunLayout, served: RunConfig) -> None:
    parts = served.model_copy(update={"teacher": served.teacher.model_copy(update={"max_batch": 2})})
    lengths = (3, 0, 6, 5, 8, 1, 7)
    async with TeacherClient.opened(served, layout) as whole, TeacherClient.opened(parts, layout) as cut:
        one, other = await whole.teach(some_group(lengths)), await cut.teach(some_group(lengths))
    for name in (IDS_COLUMN, LOGPROBS_COLUMN):
        np.testing.assert_allclose(one.columns[name].values, other.columns[name].values, atol=1e-5)
        assert len(one.columns[name].values) == 4 * int(other.columns[name].lengths[1].astype(bool).sum())


async def test_what_an_environment_attached_itself_is_left_as_it_is(
    layout: RunLayout, served: RunConfig
) -> None:
    own = some_group((2,), distill_token_ids=[[[], [3]]], distill_logprobs=[[[], [-0.5]]])
    async with TeacherClient.opened(served, layout) as teacher:
        assert await teacher.teach(own) is own


@pytest.mark.usefixtures("served")
async def test_its_name_and_the_dialect_of_its_errors(layout: RunLayout) -> None:
    url = (await address(layout)).url
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "sage"
        async with session.get(f"{url}/health") as response:
            assert (await response.json())["status"] == "ok"
        async with session.post(f"{url}/v1/token_logprobs", data=b"nonsense") as response:
            assert response.status == 400
            assert "invalid request" in (await response.json())["error"]["message"]
        async with session.get(f"{url}/v1/token_logprobs") as response:
            assert response.status == 405


async def test_a_token_lets_the_workers_in_and_nobody_else(layout: RunLayout, model_dir: Path) -> None:
    token = layout.root / "token"
    write_private(token, b"0123456789abcdef")
    config = run_of(layout, {"path": str(model_dir)})
    config = config.model_copy(update={"run": config.run.model_copy(update={"http_token_file": token})})
    layout.config.write_text(config.model_dump_json())
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    url = (await address(layout)).url
    async with TeacherClient.opened(config, layout) as teacher:
        assert IDS_COLUMN in await teacher.teach(some_group())
    elsewhere = config.teacher.model_copy(update={"path": "", "url": f"{url}/t/0123456789abcdef"})
    async with TeacherClient.opened(config.model_copy(update={"teacher": elsewhere}), layout) as teacher:
        assert IDS_COLUMN in await teacher.teach(some_group())
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        assert response.status == 401
        assert "authorization" in (await response.json())["error"]["message"]
    stop.request("the end of the test")
    await task


async def test_a_teacher_of_another_tokenizer_does_not_begin(layout: RunLayout, tmp_path: Path) -> None:
    other = save_model(
        tmp_path / "other", 5, **SMALL, alphabet="0123456789 ="
    )  # the same characters, other ids
    run_of(layout, {"path": str(other)})
    with pytest.raises(TokenizerMismatchError, match="its tokenizer differs from the student's"):
        await serve(layout.root, Stop())
    assert not layout.teacher.exists()


@pytest.mark.usefixtures("served")
async def test_a_student_of_another_tokenizer_is_refused_by_whoever_serves(
    layout: RunLayout, tmp_path: Path
) -> None:
    """As with a teacher of another run, which never saw this run's tokenizer."""
    elsewhere = RunLayout(tmp_path / "elsewhere")
    elsewhere.root.mkdir()
    config = run_of(elsewhere, {"url": (await address(layout)).url})
    write_tokenizer(ModelConfig(alphabet="abc"), elsewhere.model)
    async with TeacherClient.opened(config, elsewhere) as teacher:
        with pytest.raises(TokenizerMismatchError, match=fingerprint(elsewhere.model)[:16]):
            await teacher.teach(some_group())


async def test_whole_vocabularies_are_compared_where_they_are_equal_only(
    layout: RunLayout, model_dir: Path, tmp_path: Path
) -> None:
    config = run_of(layout, {"path": str(model_dir)}, kind="full")
    (layout.model / "config.json").write_text('{"vocab_size": 40}')
    with pytest.raises(VocabularyMismatchError, match="got 32 token ids, the student has 40"):
        await serve(layout.root, Stop())
    assert not layout.teacher.exists()
    (layout.model / "config.json").write_text('{"vocab_size": 32}')
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    url = (await address(layout)).url
    async with TeacherClient.opened(config, layout) as teacher:
        group = await teacher.teach(some_group())
        assert set(group.columns[IDS_COLUMN].lengths[1].tolist()) == {0, 32}
    # A student of another run, of which it hears when it is asked.
    elsewhere = RunLayout(tmp_path / "elsewhere")
    elsewhere.root.mkdir()
    config = run_of(elsewhere, {"url": url}, kind="full")
    (elsewhere.model / "config.json").write_text('{"vocab_size": 31}')
    async with TeacherClient.opened(config, elsewhere) as teacher:
        with pytest.raises(VocabularyMismatchError, match="got 32 token ids, the student has 31"):
            await teacher.teach(some_group())
    for told in ({"kind": "top_k"}, {"kind": "sampled"}):
        config = run_of(elsewhere, {"url": url}, **told)
        async with TeacherClient.opened(config, elsewhere) as teacher:
            assert IDS_COLUMN in await teacher.teach(some_group())
    stop.request("enough")
    await task


async def test_its_tokenizer_may_lie_elsewhere(layout: RunLayout, model_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(model_dir / name)
    run_of(layout, {"path": str(bare)})
    with pytest.raises(ConfigError, match="there is no such file"):
        await serve(layout.root, Stop())
    run_of(layout, {"path": str(bare), "tokenizer": str(model_dir)})
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    await address(layout)
    stop.request("enough")
    await task


async def test_a_directory_without_a_model_is_named(layout: RunLayout, tmp_path: Path) -> None:
    write_tokenizer(ModelConfig(), tmp_path)
    run_of(layout, {"path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"teacher\.path: .* is not a directory with a config\.json"):
        await serve(layout.root, Stop())
    run_of(layout, {})
    with pytest.raises(ConfigError, match="no teacher of its own"):
        await serve(layout.root, Stop())


async def test_one_that_waits_for_the_students_tokenizer_ends_when_it_is_asked(
    layout: RunLayout, model_dir: Path
) -> None:
    run_of(layout, {"path": str(model_dir)})
    (layout.model / "tokenizer.json").unlink()
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    await asyncio.sleep(0)
    stop.request("enough")
    await task
    assert not layout.teacher.exists()


@pytest.mark.extended
async def test_killed_and_started_again_it_costs_a_pause_and_no_group(
    layout: RunLayout, model_dir: Path
) -> None:
    config = run_of(layout, {"path": str(model_dir)})
    command = (sys.executable, "-m", "rolloutmq.launch.cli", "teacher", "--run-dir", str(layout.root))

    async def started() -> asyncio.subprocess.Process:
        with (layout.root / "out").open("ab") as out:
            return await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)

    first = await started()
    try:
        before = await address(layout)
        async with TeacherClient.opened(config, layout) as teacher, asyncio.timeout(DEADLINE_S):
            wanted = await teacher.teach(some_group())
            os.kill(first.pid, signal.SIGKILL)
            await first.wait()
            waiting = asyncio.create_task(teacher.teach(some_group()))
            while not teacher.retries:  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.01)
            assert "1 groups for the teacher" in teacher.wait(float("inf"))
            assert before.url in teacher.wait(float("inf"))
            first = await started()
            found = await waiting
            assert teacher.wait(float("inf")) == ""
    finally:
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == 0
    np.testing.assert_array_equal(
        found.columns[LOGPROBS_COLUMN].values, wanted.columns[LOGPROBS_COLUMN].values
    )
    after = msgspec.json.decode(layout.teacher.read_bytes(), type=InferenceAddress)
    assert after.url == before.url
    assert after.pid != before.pid


def test_one_place_only() -> None:
    with pytest.raises(ValueError, match=r"url must be empty with teacher\.path"):
        TeacherConfig(path="a", url="http://b")
