"""Relays as processes that are killed, relays behind relays, and an engine that samples from what a relay received."""

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.trainer.weights.stream.support import Engine, Trainer, V, received

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, PackageMissingError, WeightsTornError
from rolloutmq.schemas.files import RunLayout, StreamAddress
from rolloutmq.services.inference.jobs import Job
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.tiny.policy import ServedPolicy
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.stream.channel import Channel
from rolloutmq.trainer.weights.stream.relay import Following, serving
from rolloutmq.trainer.weights.stream.sources import RunSource

DEADLINE_S = 60.0


class Relays:
    """Relays of several run directories, each a process."""

    def __init__(self) -> None:
        self._running: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self, layout: RunLayout, source: RunLayout | None = None, listen: str = "") -> None:
        layout.root.mkdir(mode=0o700, exist_ok=True)
        if not layout.config.exists():
            write_json(layout.config, RunConfig())
        command = [sys.executable, "-P", "-m", "rolloutmq.launch.service_process", "relay"]
        command += ["--run-dir", str(layout.root)]
        command += ["--source", str(source.root)] if source else []
        command += ["--listen", listen] if listen else []
        with (layout.root / "relay.log").open("ab") as log:
            self._running[layout.root] = subprocess.Popen(command, stdout=log, stderr=log)

    def end(self, layout: RunLayout, number: signal.Signals) -> int:
        process = self._running.pop(layout.root)
        process.send_signal(number)
        return process.wait()

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        gc.collect()
        for root in self._running:
            segment_file.sweep(root / "weights.json")
        segment_file.sweep(kind="stage")


@pytest.fixture
def relays() -> Iterator[Relays]:
    made = Relays()
    yield made
    made.close()


def engine_of(layout: RunLayout) -> Engine:
    _until(layout.weights.exists)
    return Engine(layout)


def _until(what: "threading.Event | object") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)  # another process acts: there is no event to wait for


def _reach(engine: Engine, version: V) -> None:
    """Wait for a version; until then the engine has a whole one, or refuses half-written ones."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            found = engine.version_whole()
        except WeightsTornError:
            found = None
        if found == version:
            return
        assert time.monotonic() < deadline, f"{found} instead of {version}"
        time.sleep(0.005)


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.extended)])
def test_killed_relays_leave_whole_versions(
    trainer: Trainer, host: RunLayout, relays: Relays, kills: int
) -> None:
    relays.start(trainer.layout)
    relays.start(host, trainer.layout)
    engine, dice = engine_of(host), random.Random(kills)
    for step in range(1, kills + 1):
        trainer.step(step)
        threading.Event().wait(dice.random() * 0.1)
        if step % 2:
            relays.end(host, signal.SIGKILL)
            relays.start(host, trainer.layout)
        else:
            relays.end(trainer.layout, signal.SIGKILL)
            relays.start(trainer.layout)
        try:
            assert engine.version_whole().step <= step
        except WeightsTornError:
            assert step % 2  # only a receiver that dies while it switches leaves this, until its next life
        if dice.random() < 0.5:
            _reach(engine, V(0, step))
    _reach(engine, V(0, kills))
    assert relays.end(host, signal.SIGTERM) == 0
    assert relays.end(trainer.layout, signal.SIGTERM) == 0
    assert not trainer.layout.stream.exists()
    assert engine.version_whole() == V(0, kills)  # engines keep what they have
    engine.share.close()
    del engine
    gc.collect()
    segment_file.sweep(host.weights)
    segment_file.sweep(kind="stage")


def test_a_relay_feeds_another(trainer: Trainer, host: RunLayout, relays: Relays) -> None:
    last = RunLayout(host.root.parent / "last")
    relays.start(trainer.layout)
    relays.start(host, trainer.layout, "tcp://127.0.0.1:0")
    relays.start(last, host)
    engine = engine_of(last)
    for step in (1, 2):
        trainer.step(step)
        _reach(engine, V(0, step))
    engine.share.close()


def test_a_relay_says_what_it_waits_for(host: RunLayout, trainer: Trainer, relays: Relays) -> None:
    relays.start(host, trainer.layout)
    log = host.root / "relay.log"
    _until(lambda: b"waiting for=weights reason=" in log.read_bytes())
    assert f"{trainer.layout.stream} is not there" in log.read_text()
    assert relays.end(host, signal.SIGTERM) == 0


class Sealed:
    """A source that encrypts, on a host without the package for it."""

    def dial(self) -> Channel:
        raise PackageMissingError("the package cryptography", "install it")


def test_a_relay_without_the_package_for_encryption_ends(host: RunLayout) -> None:
    following = Following(host, Sealed())
    try:
        with pytest.raises(PackageMissingError):
            following.run()
    finally:
        following.close()


def test_an_engine_samples_with_the_received_version(run_dir: Path, host: RunLayout) -> None:
    layout = RunLayout(run_dir)
    config = RunConfig.model_validate({"weights": {"backend": "stream"}})
    policy = build_policy(config.model, 0)
    for one in (layout, host):
        write_json(one.config, config)
        write_identity(policy, config.model, one.model)
    share = WeightShare.create_or_adopt(
        policy, layout.weights, version=V(2, 5), tokenizer=directory_fingerprint(layout.model)
    )
    sender, snapshots = serving(layout, "tcp://127.0.0.1:0", insecure=False)
    try:
        with received(host) as mine:
            channel = RunSource(layout, "host").dial()
            mine.take_next(channel)
            served = ServedPolicy.attach(host, max_rows=8, seed=0)
            assert served is not None
            assert _sampled(served) == [V(2, 5)]
            with share.writing(V(2, 6)), torch.no_grad():
                next(policy.parameters()).add_(0.5)
            assert _sampled(served) == [V(2, 5)]
            mine.take_next(channel)
            assert _sampled(served) == [V(2, 6)]
            channel.close()
            served.close()
            del served
    finally:
        sender.close()
        snapshots.close()
        share.close(unlink=True)
        del policy, share
        gc.collect()


def _sampled(served: ServedPolicy) -> list[V]:
    job = Job([[1, 5, 6]], Sampling(n=2, max_tokens=3))
    served.generate([job], lambda _jobs: None)
    return sorted({span.version for one in job.results for span in one.spans})


def test_the_address_is_private_and_names_the_port(trainer: Trainer) -> None:
    with trainer.served() as address:
        assert address.port
        assert not address.sealed
        assert trainer.layout.stream.stat().st_mode & 0o777 == 0o600
        assert read_json(trainer.layout.stream, StreamAddress) == address


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:1", "tcp://host", "tcp://host:x", "ipc://a:1", "tcp://h:1/x"]
)
def test_other_addresses_are_refused(host: RunLayout, text: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp://HOST:PORT"):
        serving(host, text, insecure=False)
