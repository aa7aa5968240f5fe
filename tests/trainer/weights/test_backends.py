"""Backends by configuration, and the leftovers of another backend in the same run."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, SegmentGoneError, SegmentInUseError
from rolloutmq.schemas.files import RunLayout, SentAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.weights.address import PARCEL, owner_lives
from rolloutmq.trainer.weights.backends import attach, attach_as, owned
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.share import Level

WAYS = [("posix_shm", "disk"), ("disk", "posix_shm")]
V = PolicyVersion
OWNER = """
import sys
from pathlib import Path
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.files import RunLayout
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.weights.backends import owned
config = RunConfig.model_validate({"weights": {"backend": sys.argv[2]}})
with owned(build_policy(config.model, 0), config, RunLayout(Path(sys.argv[1])), PolicyVersion(0, 7)):
    print("ready", flush=True)
    sys.stdin.read()
"""


def way(backend: str) -> RunConfig:
    return RunConfig.model_validate({"weights": {"backend": backend}})


@pytest.mark.parametrize(("before", "after"), [WAYS[0], pytest.param(*WAYS[1], marks=pytest.mark.extended)])
def test_what_a_dead_life_shared_in_another_way_goes(run_dir: Path, before: str, after: str) -> None:
    layout = RunLayout(run_dir)
    command = [sys.executable, "-c", OWNER, str(run_dir), before]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert owner_lives(layout.weights)
        process.kill()
    assert not owner_lives(layout.weights)
    segment = segment_file.read_address(layout.weights)
    config = way(after)
    policy: Any = build_policy(config.model, 1)
    with owned(policy, config, layout, V(1, 7)):
        assert segment is None or not Path(segment.path).exists()
        assert layout.versions.exists() == (after == "disk")
        reader: Any = build_policy(config.model, 2)
        with pytest.raises(SegmentGoneError):
            attach_as(before, reader, layout.weights)
        share = attach_as(after, reader, layout.weights)
        with share.reading() as version:
            assert version == V(1, 7)
        told = attach(build_policy(config.model, 3), layout.weights)
        assert type(told) is type(share)
        told.verify(Level.DIGESTS if after == "disk" else Level.ALIASING)
        told.close()
        share.close()
    assert not layout.weights.exists()
    assert not layout.versions.exists()


@pytest.mark.parametrize("after", ["disk", "posix_shm"])
def test_what_a_dead_life_was_sending_goes(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    layout, config, me = RunLayout(run_dir), way(after), segment_file.SegmentOwner.current()
    monkeypatch.setattr(segment_file, "SHM", tmp_path)
    on_its_way = tmp_path / f"{segment_file.PREFIX}{'0' * 16}-{PARCEL}"
    on_its_way.write_bytes(b"half of a model")
    write_json(layout.weights, SentAddress(sender=(me.pid, me.start_ticks - 1, me.namespace)))
    with owned(build_policy(config.model, 1), config, layout, V(1, 7)):
        assert not on_its_way.exists()


def test_what_a_dead_life_published_stays_until_there_is_a_newer_version(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, config = RunLayout(run_dir), way("disk")
    DiskShare.create(build_policy(config.model, 1), layout.weights, version=V(0, 3)).close()
    (before,) = (path for path in layout.versions.iterdir() if path.is_dir())
    found = list[bool]()
    publish = DiskShare._publish

    def looked(share: DiskShare, version: PolicyVersion) -> None:
        found.append(before.is_dir())
        publish(share, version)

    monkeypatch.setattr(DiskShare, "_publish", looked)
    with owned(build_policy(config.model, 1), config, layout, V(1, 3)):
        assert found == [True]


@pytest.mark.parametrize(("backend", "_other"), WAYS)
def test_after_a_failure_the_weights_stay_for_the_next_life(
    run_dir: Path, backend: str, _other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, config = RunLayout(run_dir), way(backend)
    with pytest.raises(ZeroDivisionError), owned(build_policy(config.model, 1), config, layout, V(0, 3)):
        raise ZeroDivisionError
    monkeypatch.setattr(
        segment_file.SegmentOwner, "alive", lambda _self: False
    )  # this process had the life before, too
    with closing(attach_as(backend, build_policy(config.model, 2), layout.weights)) as share:
        assert share.version == V(0, 3)
    with (
        owned(build_policy(config.model, 1), config, layout, V(1, 3)),
        closing(attach_as(backend, build_policy(config.model, 2), layout.weights)) as share,
    ):
        assert share.version == V(1, 3)


def test_a_second_trainer_of_a_run_on_disk_is_refused(run_dir: Path) -> None:
    layout, config = RunLayout(run_dir), way("disk")
    with owned(build_policy(config.model, 1), config, layout, V()):
        second = owned(build_policy(config.model, 1), config, layout, V())
        with pytest.raises(SegmentInUseError):
            second.__enter__()


def test_what_has_no_readers_is_said(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights\.backend: no server can attach to `vllm_http`"):
        attach_as("vllm_http", build_policy(RunConfig().model, 0), run_dir / "weights.json")
