"""A whole run directory: every file that the programs of a run leave there, valid, by its path."""

import asyncio
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
from tests.fuzz.decoders import spool_seed
from tests.fuzz.recovery.runs import runs, settings
from tests.fuzz.recovery.tree import Odd, Tree, gathered
from tests.services.broker.bench import Bench
from torch import nn

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.encoding.codec import encode
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.schemas import files
from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState
from rolloutmq.services.gateway.atropos_wire import RegisterEnv, Registration
from rolloutmq.services.gateway.in_doubt import InDoubt
from rolloutmq.services.gateway.registry import Registry, RegistryState
from rolloutmq.services.orchestrator.autoscaling.control_law import PressureController
from rolloutmq.services.orchestrator.autoscaling.decision_log import (
    DecisionLog,
    DecisionLogHeader,
    LoggedDecision,
)
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample, WorkerCounts
from rolloutmq.services.process.identity import boot_id
from rolloutmq.services.telemetry.recorder import Recorder
from rolloutmq.trainer import checkpoint
from rolloutmq.trainer.files.checkpoints import TrainerState
from rolloutmq.trainer.step.optimizer import PolicyOptimizer
from rolloutmq.trainer.trained_log import TrainedLog

PRODUCER: Final = "p"
WORKER: Final = "sort-0"
NO_PID: Final = (1 << 22) + 1
"""Above every pid: no process of this machine has it."""


@cache
def run_directory() -> Tree:
    """Return the files of a run that has ended."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "run"
        root.mkdir(mode=0o700)
        layout = RunLayout(root)
        _write_states(layout)
        _write_lines(layout)
        _write_gateway(layout)
        _write_decisions(layout)
        _write_checkpoints(layout)
        _write_model(layout)
        tree = gathered(root)
    remembered = next(run for run in runs() if run.name == "remembered")
    young = next(run for run in runs() if run.name == "young")
    return {
        **tree,
        "saved.rmq": remembered.tree["saved.rmq"],
        **{name: _trimmed(data) for name, data in young.tree.items() if name.startswith("journal/groups")},
        **{name: data for name, data in young.tree.items() if name.startswith("journal/events")},
        f"spools/{PRODUCER}.rmq": spool_seed(),
        "config.toml": b'[broker]\nlease_s = 30.0\n[environment.sort]\nentry = "a:B"\nmax_staleness = 2\n',
        "token": b"0123456789abcdef-0123456789abcdef\n",
        "sockets/lock": msgspec.json.encode({"pid": NO_PID, "epoch": 17}).ljust(128),
    }


def _trimmed(data: bytes | Odd) -> bytes:
    """Return a segment without the room reserved behind its records."""
    assert isinstance(data, bytes)
    return data.rstrip(b"\0") + bytes(8)


def _identity(name: str, role: Role) -> ProcessIdentity:
    return ProcessIdentity(
        name=name, role=role, pid=NO_PID, start_ticks=1, boot_id=boot_id(), marker=f"token/{name}"
    )


def _write_states(layout: RunLayout) -> None:
    """Write the files that are replaced as a whole."""
    worker = files.WorkerRecord(
        worker=WORKER, env="sort", phase="running", since=1.0, pid=NO_PID, started=1.0
    )
    target = files.Target(env="sort", target=2, current=1, reason="hold")
    launcher, broker = _identity("launcher", Role.LAUNCHER), _identity("broker", Role.BROKER)
    states: dict[Path, Any] = {
        layout.config: settings(),
        layout.owner: launcher,
        layout.hub: [files.HubSource(key="model", name="org/tiny", revision="", commit="0" * 40)],
        layout.lives: [Life(1.0, 2.0), Life(5.0)],
        layout.ending: files.EndNotice("ending, waits for: broker"),
        layout.crashes: [files.ServiceCrash("telemetry", 4, 1.0, "exit code 1")],
        layout.processes: [broker],
        layout.workers: [_identity(WORKER, Role.WORKER)],
        layout.engines: [_identity("inference-1", Role.INFERENCE)],
        layout.supervision: files.Supervision(orchestrator=launcher, targets=(target,), workers=(worker,)),
        layout.gpus: files.GpuBook(gpus=(_gpu(),), limits={"sort": "no gpu"}),
        layout.endpoints: files.Endpoints(
            ingest="ipc:///a", serve="ipc:///b", events="ipc:///c", publish="tcp://127.0.0.1:1", pid=NO_PID, epoch=17
        ),
        layout.inference: files.InferenceAddress(url="http://127.0.0.1:1", pid=NO_PID, number=3, at=2.0),
        layout.engine("inference-1"): files.InferenceAddress(url="http://[::1]:2", pid=NO_PID, name="inference-1"),
        layout.teacher: files.InferenceAddress(url="http://127.0.0.1:3", pid=NO_PID, name="teacher"),
        layout.gateway: files.GatewayAddress(url="http://127.0.0.1:8000", pid=NO_PID),
        layout.vllm: files.VllmAddress(url="unix:/x", nonce="n"),
        layout.weights: files.SentAddress(sender=SegmentOwner(NO_PID, 1, 1), version=PolicyVersion(0, 2)),
        layout.ranks: {"port": 1, "nonce": "n"},
        layout.summary: {"ended": "done", "wall_s": 1.5, "steps": 3},
        layout.root / "gateway.lock": files.RunHolder(name="gateway", pid=NO_PID, since=5.0),
    }  # fmt: skip
    for path, state in states.items():
        write_json(path, state)


def _gpu() -> files.GpuRecord:
    standing = GpuStanding(
        uuid="GPU-0", host="h", name="n", at=1.0, causes=(Cause.HEAT,), reason="hot", holders=(WORKER,)
    )
    sample = GpuSample(uuid="GPU-0", number=1, at=1.0, name="n", state=GpuState.OK, temperature_c=80.0)
    return files.GpuRecord(
        standing=standing,
        automatic={Cause.HEAT: ("1", "hot")},
        manual="asked",
        dismissed=(files.Dismissed(Cause.XID, "5"),),
        sample=sample,
    )


def _write_lines(layout: RunLayout) -> None:
    """Write the logs that grow by a line."""
    log = TrainedLog(layout.trained)
    log.write(files.SettledBatch(at=1.0, version=PolicyVersion(0, 0), resumed=True))
    for step in range(1, 5):
        line = files.SettledBatch(
            at=float(step),
            version=PolicyVersion(0, step),
            trained=(f"g{step}", f"h{step}"),
            filtered=("f",) if step == 2 else (),
            staleness=(0, 1),
            rewards=(0.5, 0.25),
        )
        log.write(line)
    log.close()
    layout.settled.write_bytes(layout.trained.read_bytes())
    layout.acks.mkdir()
    acks = [
        files.AckedGroup(
            group_id=f"{kind}{step}",
            session=4,
            seq=step,
            at=float(step),
            env="sort",
            sequences=4,
            tokens=40,
            duration_s=1.5,
            reward=0.5,
        )
        for kind in "gh"
        for step in range(1, 5)
    ]
    _write_jsonl(layout.ack_log(PRODUCER), acks)
    _write_jsonl(
        layout.dropped, [files.DroppedGroup(at=2.0, group_id="d", state="expired", reason="stale")] * 2
    )
    recorder = Recorder(layout.metrics)
    recorder.record(topics.PRESSURE, encode(Bench(settings()).pressure()), 1.0)
    recorder.record(topics.STEP, encode(_step_done(1)), 1.5)
    recorder.record(topics.STEP, encode(_step_done(2)), 2.5)
    recorder.flush()
    with layout.metrics.open("ab") as damaged:
        damaged.write(b'{"t":1.0,"topic":"step","kind":"step_done","extra":[1]}\n')
    layout.logs.mkdir()
    layout.log("broker").write_bytes(b"2026-01-01 started\nerror: x\n" * 20)
    layout.logs.joinpath("broker.log.1").write_bytes(b"before\n" * 20)


def _step_done(step: int) -> StepDone:
    return StepDone(
        run="default", incarnation=0, step=step, at=3.0, reward=0.5, loss=0.1, tokens=10, groups=2, filtered=0,
        staleness_max=1, staleness_mean=0.5, pull_s=0.1, step_s=0.2, extra={"kl": 0.1},
    )  # fmt: skip


def _write_jsonl(path: Path, lines: list[Any]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _write_gateway(layout: RunLayout) -> None:
    book = RegistryState(
        trainer=Registration(
            wandb_group="g",
            wandb_project="p",
            batch_size=4,
            max_token_len=64,
            checkpoint_dir="c",
            save_checkpoint_interval=5,
            starting_step=0,
            num_steps=10,
        ),
        started=True,
        step=2,
    )
    registry = Registry(book, 60.0, 0.0)
    for name in ("maths", "maths", "other"):
        registry.enrol(RegisterEnv(max_token_length=64, desired_name=name, weight=1.0, group_size=2), 0.0)
    write_json(layout.registrations, book)
    asyncio.run(_doubt(layout.doubts))


async def _doubt(path: Path) -> None:
    doubts = InDoubt(path, 0.0)
    for number in range(3):
        post = await doubts.begin(bytes([number]) * 16, 2, asyncio.Event(), 0.0)
        doubts.came(post.ids[:1])
        if number:
            doubts.leave(post)
        else:
            doubts.end(post)
    doubts.hand_out(("a", "b"))
    doubts.settled(("a",))
    doubts.close()


def _write_decisions(layout: RunLayout) -> None:
    law = PressureController(1, 8, ScalingConfig())
    state, log = law.initial(2), DecisionLog(layout.decisions)
    log.begin([DecisionLogHeader("sort", 1, 8, law.scaling.model_dump(), state)])
    for number in range(6):
        now = 100.0 + number
        sample = PressureSample(
            crew=WorkerCounts(ready=state.target), heard_at=now, number=number, pressure=0.2 * number, slots=2
        )
        state, decision = law.decide(state, sample, now)
        log.add(LoggedDecision("sort", now, now, sample, decision))


def _write_checkpoints(layout: RunLayout) -> None:
    policy, optimizer = nn.Linear(3, 2), cast(PolicyOptimizer, _Still())
    identity = layout.root / "identity"
    identity.mkdir()
    (identity / "config.json").write_bytes(b'{"vocab_size": 9}')
    checkpoint.next_incarnation(layout.checkpoints)
    for step in (2, 4):
        state = TrainerState(version=PolicyVersion(0, step), unsettled=("g9",))
        checkpoint.save(layout.checkpoints, identity, state, policy, optimizer)
    (identity / "config.json").unlink()
    identity.rmdir()


class _Still:
    """An optimizer without moments."""

    def state(self) -> dict[str, torch.Tensor]:
        return {"moment": torch.zeros(2)}


def _write_model(layout: RunLayout) -> None:
    layout.model.mkdir()
    (layout.model / "config.json").write_bytes(b'{"vocab_size": 9, "text_config": {"vocab_size": 8}}')
    tokenizer = {
        "added_tokens": [{"id": 0, "content": "<p>", "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "x"},
        "model": {"vocab": {"a": 1, "b": 2}},
    }
    (layout.model / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
