"""A real vLLM as a teacher: its scores match a forward pass of transformers. `make test-vllm`."""

import asyncio
import contextlib
import gc
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from tests.services.inference.vllm.support.child import END_S
from tests.services.inference.vllm.support.lent import (
    ALPHABET,
    POSITIONS,
    PYTHON,
    VOCABULARY,
    missing,
    model_of,
)

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.distillation import IDS_COLUMN, LOGPROBS_COLUMN
from rolloutmq.services.inference.teacher.server import serve
from rolloutmq.services.inference.vllm.command import START, VARIABLES
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.worker.teacher_client import TeacherClient
from rolloutmq.trainer.policy.tokenizer import write_tokenizer

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

EXACT = 1e-5
START_S = 300.0


def save(directory: Path, model: Any, alphabet: str = ALPHABET) -> Path:
    model.save_pretrained(directory)
    write_tokenizer(ModelConfig(alphabet=alphabet, vocab_size=VOCABULARY, max_positions=POSITIONS), directory)
    return directory


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield model_of("qwen2", seed=4)
    gc.collect()


@pytest.fixture(scope="module")
def sage(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("sage"), model)


def wait_ready(port: int, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "it ended"
        assert time.monotonic() < until, "it did not come up"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def vllm(sage: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A vLLM as somebody starts it who knows nothing of this package."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(PYTHON), str(START), str(os.getpid()), "--model", str(sage), "--served-model-name", "sage"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(1 << 27), "--max-model-len", str(POSITIONS)]
    command += ["--max-logprobs", str(VOCABULARY)]
    env = {**os.environ, **VARIABLES, "OMP_NUM_THREADS": "1"}
    with (sage / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_ready(port, process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End it in order, with its engine: one whose server alone is killed goes on for ever."""
    process.terminate()
    try:
        process.wait(30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_S)


def run_of(root: Path, path: Path, url: str, **distillation: Any) -> tuple[RunConfig, RunLayout]:
    root.mkdir(exist_ok=True)
    layout = RunLayout(root)
    config = RunConfig.model_validate(
        {
            "teacher": {"path": str(path), "vllm_url": url, "retry_s": 0.05},
            "trainer": {"distillation": distillation},
        }
    )
    layout.config.write_text(config.model_dump_json())
    layout.model.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        (layout.model / name).write_bytes((path / name).read_bytes())
    return config, layout


@asynccontextmanager
async def serving(layout: RunLayout) -> AsyncIterator[str]:
    """Serve the teacher of a run; yield where."""
    layout.teacher.unlink(missing_ok=True)
    stop = Stop()
    task = asyncio.create_task(serve(layout.root, stop))
    try:
        async with asyncio.timeout(START_S):
            while (found := read_json(layout.teacher, InferenceAddress)) is None:
                assert not task.done(), task.result()
                await asyncio.sleep(0.05)
        yield found.url
    finally:
        stop.request("enough")
        await task


def some_group() -> Group:
    """Sequences as they come: short and long, ids behind the tokenizer too, one that nothing is trained of."""
    rng = np.random.default_rng(0)
    lengths = (6, 2, POSITIONS - 1, 30, 9)
    trained = [rng.random(n) < 0.7 for n in lengths]
    for mask in trained:
        mask[:1] = False
    trained[-1][:] = False
    return Group.build(
        "g",
        tokens=[rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths],
        mask=trained,
        scores=[0.0] * len(lengths),
        inference_logprobs=[np.zeros(n) for n in lengths],
    )


def difference(model: Any, group: Group) -> float:
    """Return the largest difference between what was told and a forward pass, of tokens and of the tail."""
    worst = 0.0
    for tokens, mask, ids, told in zip(
        group["tokens"], group["mask"], group[IDS_COLUMN], group[LOGPROBS_COLUMN], strict=True
    ):
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(tokens[None].astype(np.int64))).logits[0]
        own = logits.float().log_softmax(-1).numpy()
        for place in np.flatnonzero(mask):
            assert len(set(ids[place].tolist())) == len(ids[place])
            there = own[place - 1, ids[place]]
            worst = max(worst, float(np.abs(told[place] - there).max()))
            if 1 < len(ids[place]) < VOCABULARY:  # none of the others is likelier
                others = np.delete(own[place - 1], ids[place])
                worst = max(worst, float(others.max() - told[place].min()))
        assert not any(len(ids[place]) for place in np.flatnonzero(~mask))
    return worst


async def test_each_kind_gets_what_a_forward_pass_says(
    vllm: tuple[str, Any], model: Any, sage: Path, tmp_path: Path
) -> None:
    url, _ = vllm
    for kind, k in (("top_k", 16), ("sampled", 1), ("full", VOCABULARY)):
        config, layout = run_of(tmp_path / "run", sage, url, kind=kind)
        async with serving(layout), TeacherClient.opened(config, layout) as teacher:
            group = await teacher.teach(some_group())
        cells = group.columns[IDS_COLUMN].lengths[1]
        assert set(cells.tolist()) == {0, k}
        if kind == "sampled":
            for tokens, mask, ids in zip(group["tokens"], group["mask"], group[IDS_COLUMN], strict=True):
                assert all(ids[place] == [tokens[place]] for place in np.flatnonzero(mask))
        assert difference(model, group) < EXACT


async def test_one_of_another_tokenizer_or_that_tells_too_little_does_not_begin(
    vllm: tuple[str, Any], model: Any, sage: Path, tmp_path: Path
) -> None:
    url, _ = vllm
    other = save(tmp_path / "other", model, ALPHABET[::-1])
    _, layout = run_of(tmp_path / "run", other, url, kind="top_k")
    with pytest.raises(ConfigError, match=r"teacher\.vllm_url: the tokenizer of .* is not that of"):
        await serve(layout.root, Stop())
    config = json.loads((sage / "config.json").read_text())
    larger = save(tmp_path / "larger", model)
    (larger / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY + 1}))
    _, layout = run_of(tmp_path / "run", larger, url, kind="full")
    with pytest.raises(ConfigError, match=rf"prompt logprobs of {VOCABULARY + 1}, .* {VOCABULARY}"):
        await serve(layout.root, Stop())
    assert not layout.teacher.exists()


async def test_one_that_is_gone_is_waited_for(
    vllm: tuple[str, "subprocess.Popen[bytes]"], sage: Path, tmp_path: Path
) -> None:
    url, process = vllm
    config, layout = run_of(tmp_path / "run", sage, url, kind="top_k")
    async with serving(layout) as served, TeacherClient.opened(config, layout) as teacher:
        end(process)
        waiting = asyncio.create_task(teacher.teach(some_group()))
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{served}/health") as response:
                    if response.status == 503 and teacher.retries > config.teacher.attempts:
                        break
                await asyncio.sleep(0.05)
        assert not waiting.done()
        assert "vLLM is unavailable" in teacher.wait(float("inf"))
        waiting.cancel()
        await asyncio.wait([waiting])
