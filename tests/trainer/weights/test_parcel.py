"""A file of weights that is held while it is written and read, and what is left when its maker is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rolloutmq.bus import segments
from rolloutmq.trainer.weights.manifest import DTYPES
from rolloutmq.trainer.weights.parcel import TYPES, parcel


def tensors() -> dict[str, torch.Tensor]:
    found = {f"one.{kind}": torch.arange(15).reshape(3, 5).to(getattr(torch, kind)) for kind in DTYPES}
    return found | {"scalar": torch.tensor(2.5), "nothing": torch.empty(0, 3), "a": torch.ones(1).bool()}


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    with parcel(tmp_path) as made:
        made.write(tensors(), {"manifest": '{"name": "ä"}'})
        with safe_open(made.path, framework="pt") as file:
            assert file.metadata() == {"manifest": '{"name": "ä"}'}
            assert set(file.keys()) == set(tensors())
            for name, tensor in tensors().items():
                found = file.get_tensor(name)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(found, tensor)
    assert list(tmp_path.iterdir()) == []
    assert {str(one).removeprefix("torch.") for one in TYPES} == set(DTYPES)


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    """Of tensors of one type, where the order of the library is the order of the names."""
    found = {name: torch.rand(3, 5) for name in "bca"}
    save_file(found, tmp_path / "theirs", metadata={"k": "v"})
    with parcel(tmp_path) as made:
        made.write(found, {"k": "v"})
        assert made.path.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_it_is_held_as_long_as_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SHM", tmp_path)
    with parcel(tmp_path) as made:
        made.write(tensors(), {})
        assert os.fstat(made.fd).st_ino == made.path.stat().st_ino
        assert segments.in_use(made.path)
        assert segments.sweep() == []
        assert list(tmp_path.iterdir()) == [made.path]
    assert not made.path.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from rolloutmq.trainer.weights import parcel
def die(tensor):
    os.kill(os.getpid(), signal.SIGKILL)
parcel._bytes = die
with parcel.parcel(Path(sys.argv[1])) as made:
    made.write({"a": torch.ones(1 << 20)}, {"k": "v" * 100_000})
"""


def test_what_a_killed_maker_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SHM", tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size > 0
    assert segments.sweep() == [left]  # at once, and not only when it is old
    assert list(tmp_path.iterdir()) == []
