"""Sharing a real GPU between two processes; skipped where there is none. Torch alone, no transformers."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.errors import SegmentGoneError, WeightsMismatchError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.cuda_ipc import CudaShare
from rolloutmq.trainer.weights.share import Level

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

OWNER = """
import sys
from pathlib import Path
import torch
from torch import nn
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.cuda_ipc import CudaShare
model = nn.ModuleList([nn.Linear(512, 512) for _ in range(8)]).to("cuda")
share = CudaShare.create_or_adopt(model, Path(sys.argv[1]))
print("ready", flush=True)
step = 0
for line in sys.stdin:
    for _ in range(int(line)):
        step += 1
        with share.writing(PolicyVersion(0, step)), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
    print("done", flush=True)
share.close(unlink=True)
"""


@pytest.fixture
def owner(run_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    address = run_dir / "weights.json"
    command = [sys.executable, "-c", OWNER, str(address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
    gc.collect()
    segment_file.sweep(address)


def order(owner: "subprocess.Popen[str]", steps: int) -> None:
    assert owner.stdin is not None
    owner.stdin.write(f"{steps}\n")
    owner.stdin.flush()


def attached(run_dir: Path) -> tuple[nn.Module, CudaShare]:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(512, 512) for _ in range(8)])
    return model, CudaShare.attach(model, run_dir / "weights.json")


def test_a_reader_sees_each_write_whole(run_dir: Path, owner: "subprocess.Popen[str]") -> None:
    model, share = attached(run_dir)
    order(owner, 200)
    seen = set()
    while share.version.step < 200:
        with share.reading() as version:
            found = {float(parameter.min()) for parameter in model.parameters()}
            found |= {float(parameter.max()) for parameter in model.parameters()}
            if version.step:
                assert found == {float(version.step)}
        seen.add(version)
    assert len(seen) > 3
    assert share.verify(Level.ALIASING).version == PolicyVersion(0, 200)
    share.close()


def test_a_killed_owner_is_noticed(run_dir: Path, owner: "subprocess.Popen[str]") -> None:
    model, share = attached(run_dir)
    owner.kill()
    owner.wait()
    with pytest.raises(SegmentGoneError, match="its owner is dead"):
        share.reading().__enter__()
    share.close()
    del model
    with pytest.raises(SegmentGoneError, match="its owner is dead"):
        attached(run_dir)


def test_expandable_segments_are_refused(run_dir: Path) -> None:
    environ = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", OWNER, str(run_dir / "weights.json")]
    done = subprocess.run(command, capture_output=True, text=True, input="", env=environ)
    assert done.returncode != 0
    assert WeightsMismatchError.__name__ in done.stderr
    assert "expandable" in done.stderr
