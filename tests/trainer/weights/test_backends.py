"""Backends by configuration, and the leftovers of another backend in the same run."""

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    ConfigError,
    SegmentGoneError,
    SegmentInUseError,
    WeightsMismatchError,
    WeightsTornError,
)
from rolloutmq.schemas.files import RunLayout, SentAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.model import build_policy, skeleton
from rolloutmq.trainer.weights.address import PARCEL, owner_lives
from rolloutmq.trainer.weights.backends import attach, attach_as, owned
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.posix_shm import WeightShare
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


@pytest.mark.parametrize("backend", ["disk", "posix_shm"])
def test_a_source_is_published_tensor_by_tensor(run_dir: Path, backend: str) -> None:
    """The shared model is on meta, and at most two tensors of the source are alive at a time."""
    layout, config = RunLayout(run_dir), way(backend)
    model: Any = build_policy(config.model, 1)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name in model.state_dict():
            tensor = model.get_parameter(name).detach().clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in alive))
            yield name, tensor

    with owned(skeleton(model.config, torch.float32), config, layout, V(0, 3), source) as share:
        reader: Any = build_policy(config.model, 2)
        attached: Any = attach_as(backend, reader, layout.weights)
        for version, change in ((V(0, 3), 0.0), (V(0, 4), 1.0)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(change)
            if change:
                with share.writing(version):
                    pass
            with attached.reading() as found:
                assert found == version
                assert all(map(torch.equal, reader.state_dict().values(), model.state_dict().values()))
        assert attached.verify(Level.DIGESTS if backend == "disk" else Level.ALIASING).version == V(0, 4)
        assert isinstance(share, DiskShare | WeightShare)
        assert share.verify(Level.MANIFEST).version == V(0, 4)
        with pytest.raises(ValueError, match="verify at a reader"):
            share.verify(Level.DIGESTS)
        attached.close()
    assert most <= 2


@pytest.mark.parametrize("backend", ["disk", "posix_shm"])
def test_a_source_that_fails_publishes_no_version(run_dir: Path, backend: str) -> None:
    layout, config = RunLayout(run_dir), way(backend)
    state = dict(build_policy(config.model, 1).state_dict())
    model = skeleton(build_policy(config.model, 1).config, torch.float32)
    with owned(model, config, layout, V(0, 3), lambda: state.items()) as share:
        assert isinstance(share, DiskShare | WeightShare)
        name, tensor = state.popitem()
        with pytest.raises(WeightsMismatchError, match=f"{name}.*was not given"), share.writing(V(0, 4)):
            pass
        assert share.is_torn()
        assert share.version == V(0, 3)
        state[name] = tensor
        with pytest.raises(WeightsTornError), share.writing(V(0, 4)):
            pass
        with share.writing(V(0, 4), restoring=True):
            pass
        assert not share.is_torn()
        with closing(attach_as(backend, build_policy(config.model, 2), layout.weights)) as reader:
            assert reader.version == V(0, 4)


def test_a_source_is_refused_where_the_trainers_own_tensors_are_shared(run_dir: Path) -> None:
    weights, trainer = {"backend": "cuda_ipc"}, {"device": "cuda"}
    kind = {"kind": "external", "url": "http://127.0.0.1:9"}
    config = RunConfig.model_validate({"weights": weights, "trainer": trainer, "inference": kind})
    sharing = owned(build_policy(config.model, 1), config, RunLayout(run_dir), V(), lambda: ())
    with pytest.raises(ConfigError, match=r"weights\.backend: cuda_ipc shares the trainer's own"):
        sharing.__enter__()


SHARDED = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.model import build_policy, skeleton
from rolloutmq.trainer.sharding import gathered
from rolloutmq.trainer.weights.backends import owned
run_dir, backend, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{run_dir}/meeting", rank=rank, world_size=2)
config = RunConfig.model_validate({"weights": {"backend": backend}})
policy = build_policy(config.model, 1)
meant = skeleton(policy.config, torch.float32)
fully_shard(policy, mesh=init_device_mesh("cpu", (2,)))
assert all(one.to_local().numel() < one.numel() for one in policy.parameters())
source = lambda: gathered(policy.state_dict().items())
if rank:
    for _ in source(): pass
    dist.barrier()
else:
    with owned(meant, config, RunLayout(run_dir), PolicyVersion(0, 7), source):
        print("ready", flush=True)
        sys.stdin.read()
    dist.barrier()
"""


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["disk", "posix_shm"])
def test_sharded_modules_are_published_whole(run_dir: Path, backend: str) -> None:
    """FSDP2 over two ranks: each tensor is gathered, written and dropped before the next."""
    command = [sys.executable, "-c", SHARDED, str(run_dir), backend]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    with (
        subprocess.Popen([*command, "1"], env=env) as other,
        subprocess.Popen(
            [*command, "0"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as publisher,
    ):
        assert publisher.stdin is not None
        assert publisher.stdout is not None
        try:
            assert publisher.stdout.readline() == b"ready\n"
            config = way(backend)
            reader: Any = build_policy(config.model, 2)
            with closing(attach_as(backend, reader, RunLayout(run_dir).weights)) as share:
                assert share.version == V(0, 7)
                wanted = build_policy(config.model, 1).state_dict()
                assert all(map(torch.equal, reader.state_dict().values(), wanted.values()))
            publisher.stdin.close()
            assert (publisher.wait(60), other.wait(60)) == (0, 0)
        finally:
            publisher.kill()
            other.kill()


def test_a_second_trainer_of_a_run_on_disk_is_refused(run_dir: Path) -> None:
    layout, config = RunLayout(run_dir), way("disk")
    with owned(build_policy(config.model, 1), config, layout, V()):
        second = owned(build_policy(config.model, 1), config, layout, V())
        with pytest.raises(SegmentInUseError):
            second.__enter__()


def test_what_has_no_readers_is_said(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights\.backend: no server can attach to `vllm_http`"):
        attach_as("vllm_http", build_policy(RunConfig().model, 0), run_dir / "weights.json")
