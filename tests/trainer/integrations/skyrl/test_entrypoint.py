"""SkyRL's entry point in a real Ray cluster: settings of a command line, prompts of a file, a trainer in a worker."""

import asyncio
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.trainer.integrations.skyrl.support import (
    ENDED_WITHIN_S,
    PYTHON,
    RISE,
    SIZE,
    Stage,
    config,
    environment,
    missing,
    verify,
    workers,
)

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.policy.tokenizer import write_tokenizer

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

EXPERIMENT = Path(__file__).with_name("experiment.py")
ROWS, BATCH = 12, 4
ENDED_S = 30.0
SHIM = "import typing\n\nimport typing_extensions\n\ntyping.TypedDict = typing_extensions.TypedDict\n"
"""See `START`."""
SITE = {
    "sitecustomize.py": SHIM,
    "flash_attn/__init__.py": "",
    "flash_attn/bert_padding.py": "pad_input = unpad_input = None\n",
    "flash_attn.dist-info/METADATA": "Name: flash_attn\nVersion: 0\n",
    "flash_attn.dist-info/top_level.txt": "flash_attn\n",
}
"""Modules for all processes, those of Ray, too. flash-attn needs a GPU to be built, and SkyRL imports it unused."""


REFUSED = f"""{SHIM}
import json, sys
import ray
from rolloutmq.schemas.errors import UsageError
from rolloutmq.trainer.integrations.skyrl.entrypoint import main

for sys.argv[1:] in json.loads(sys.argv[1]):
    try:
        main()
    except UsageError as error:
        print(error)
assert not ray.is_initialized()
"""


def settings(run_dir: Path) -> list[str]:
    """Return the arguments of SkyRL's simulated trainer on two CPUs."""
    place = run_dir.parent
    given = {
        "trainer.fully_async.enabled": "true",
        "trainer.fully_async.simulate_training": "true",
        "trainer.fully_async.simulate_training_step_seconds": 0,
        "trainer.fully_async.max_staleness_steps": 2,
        "trainer.fully_async.num_parallel_generation_workers": BATCH * 2,
        "trainer.train_batch_size": BATCH,
        "trainer.policy_mini_batch_size": BATCH,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.placement.colocate_all": "false",
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.logger": "console",
        "trainer.ckpt_path": place / "checkpoints",
        "trainer.export_path": place / "exports",
        "trainer.log_path": place / "logs",
        "trainer.policy.model.path": place / "model",
        "trainer.enable_ray_gpu_monitor": "false",
        "generator.inference_engine.enable_ray_prometheus_stats": "false",
        "generator.batched": "false",
        "generator.n_samples_per_prompt": SIZE,
        "generator.bus.where": run_dir,
        "generator.bus.environments.played": "mine",
        "data.train_data": f"['{place / 'prompts.jsonl'}']",
        "data.dataloader.num_workers": 0,
        "data.dataloader.persistent_workers": "false",
    }
    return [f"{name}={value}" for name, value in given.items()]


def write_inputs(place: Path) -> None:
    """Write the prompts, and a model's identity with its tokenizer."""
    rows = [
        {"prompt": [{"role": "user", "content": str(row + 10)}], "env_class": "played", "row": row}
        for row in range(ROWS)
    ]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "model").mkdir()
    write_tokenizer(config().model, place / "model")
    (place / "model" / "config.json").write_text('{"model_type": "llama"}')
    for name, text in SITE.items():
        (place / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "site" / name).write_text(text)


async def run_entry_point(place: Path, *arguments: str) -> tuple[int, str]:
    """Run the entry point with a Ray cluster of its own; return its exit code and its output. Its processes end."""
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:  # paths of Ray's sockets must be short
        env = environment() | {
            "LOG_LEVEL": "INFO",
            "RAY_ADDRESS": "local",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": scratch,
            "RAY_USAGE_STATS_ENABLED": "0",
            "SKYRL_RAY_PG_TIMEOUT_IN_S": "5",
            "WEIGHTS": str(place / "weights.json"),
        }
        env["PYTHONPATH"] = os.pathsep.join((str(place / "site"), env["PYTHONPATH"]))
        process = await asyncio.create_subprocess_exec(
            str(PYTHON), str(EXPERIMENT), *arguments,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(ENDED_WITHIN_S):
                output, _ = await process.communicate()
            await ended(process.pid)
        finally:
            for one in of_session(process.pid):
                one.kill()
            await process.wait()
        return process.returncode or 0, output.decode(errors="replace")


async def ended(session: int) -> None:
    """Wait until no process of the session is left."""
    async with asyncio.timeout(ENDED_S):
        while of_session(session):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.1)


def of_session(session: int) -> list[psutil.Process]:
    """Return the running processes of a session; those of Ray have groups of their own."""
    found = []
    for one in psutil.process_iter():
        try:
            if os.getsid(one.pid) == session and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


async def test_the_entry_point_trains_in_a_ray_cluster(run_dir: Path) -> None:
    """The settings, the data set, the trainer and its loop are SkyRL's, in a process of Ray's; no GPU is needed."""
    place, layout, about = run_dir.parent, RunLayout(run_dir), config(durability="os")
    write_json(layout.config, about)
    write_inputs(place)
    stage = Stage(run_dir, place / "weights.json", {})
    with running_broker(about, layout):
        async with workers(stage):
            code, output = await run_entry_point(place, *settings(run_dir))
            assert code == 0, output
            assert stage.version() == (PolicyVersion(0, 3), 3 * RISE)
    assert "Training done!" in output
    steps = list(read_lines(layout.trained, SettledBatch))
    assert [line.version.step for line in steps] == [1, 2, 3]
    assert len({name for line in steps for name in line.trained}) == ROWS
    verify(run_dir)


ON_GPU = (
    "trainer.fully_async.simulate_training=false",
    "trainer.strategy=fsdp",
    "trainer.flash_attn=false",
    "trainer.remove_microbatch_padding=false",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.ckpt_interval=1",
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
async def test_skyrls_own_trainer_steps_on_a_gpu(run_dir: Path) -> None:
    """Its FSDP worker, optimizer and checkpoints, with groups of the bus. No GPU has run it yet."""
    place, layout, about = run_dir.parent, RunLayout(run_dir), config(durability="os")
    write_json(layout.config, about)
    write_inputs(place)
    policy: Any = build_policy(about.model, 0)
    policy.save_pretrained(place / "model")
    write_identity(policy, about.model, place / "model")
    stage = Stage(run_dir, place / "weights.json", {})
    with running_broker(about, layout):
        async with workers(stage):
            code, output = await run_entry_point(place, *settings(run_dir), *ON_GPU)
            assert code == 0, output
            assert stage.version() == (PolicyVersion(0, 3), 3 * RISE)
    steps = list(read_lines(layout.trained, SettledBatch))
    assert [line.version.step for line in steps] == [1, 2, 3]
    assert len({name for line in steps for name in line.trained}) == ROWS
    assert sorted(one.name for one in (place / "checkpoints").glob("global_step_*")) == [
        f"global_step_{step}" for step in (1, 2, 3)
    ]
    verify(run_dir)


async def test_what_needs_gpus_says_so_and_ends(run_dir: Path) -> None:
    """SkyRL's own trainer builds its models on GPUs: the entry point comes as far as their placement group."""
    place = run_dir.parent
    write_inputs(place)
    real = "trainer.fully_async.simulate_training=false"
    code, output = await run_entry_point(place, *settings(run_dir), real)
    assert code == 1
    assert "requiring 1.0 GPUs" in output


def test_settings_are_refused_before_ray_starts(run_dir: Path) -> None:
    problems = {
        "generator.bus.where=": "generator.bus.where: must be the run directory",
        "generator.bus.deadline_s=5s": "generator.bus.deadline_s: must be seconds",
        "generator.bus.name=1": "generator.bus.name: must be 1 to 40 letters",
        "generator.step_wise_trajectories=true": "generator.step_wise_trajectories: must be false",
        "trainer.placement.colocate_all=true": "trainer.placement.colocate_all: must be false",
    }
    calls = [[*settings(run_dir), changed] for changed in problems]
    process = subprocess.run(
        [str(PYTHON), "-c", REFUSED, json.dumps(calls)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    said = process.stdout.splitlines()
    assert len(said) == len(problems)
    for found, problem in zip(said, problems.values(), strict=True):
        assert found.startswith(problem)
