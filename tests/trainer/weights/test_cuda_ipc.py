"""Sharing on a simulated GPU: refusals, handles, and waits for the GPU.

The fake behaves as documented: an export names memory from cudaMalloc, opening a handle in the same process gives the
same memory, and each process numbers the GPUs in its own order. `test_cuda_gpu` uses a real GPU.
"""

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from tests.trainer.weights.models import TOKENS, built, config, logits, on_meta
from torch import Tensor

from rolloutmq.bus.shm.segment_file import HEADER, LAYOUT, MAGIC, SegmentOwner
from rolloutmq.schemas.errors import MissingError, SegmentGoneError, SegmentInUseError, WeightsMismatchError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.cuda_ipc import (
    HANDLE_AT,
    CudaHandle,
    CudaShare,
    TorchCuda,
    arguments_of,
    handle_of,
    require_plain_memory,
)
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.share import Level

V = PolicyVersion
GPUS = ["GPU-aaaa", "GPU-bbbb"]


def fifteen(tensor: Tensor, device: int) -> tuple[Any, ...]:
    """What `reduce_tensor` gives for a CUDA tensor."""
    return (
        *(type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()),
        *(torch.storage.TypedStorage, tensor.dtype, device, b"\x00handle\xff", tensor.numel(), 512),
        *(False, b"/torch_counter", 3, b"\x01event", True),
    )


class FakeCuda:
    """A GPU in this process; `log` has what was asked of it, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.exported: Tensor | None = None
        self.expandable = False
        self.faulty = False
        self.visible = list(GPUS)

    def allocate(self, nbytes: int, like: Tensor) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

    def export(self, flat: Tensor) -> CudaHandle:
        segment = {
            "address": flat.data_ptr(),
            "total_size": flat.numel(),
            "is_expandable": self.expandable,
        }
        require_plain_memory(flat.data_ptr(), [segment])
        self.exported = flat
        return handle_of(fifteen(flat, 1), GPUS)

    def open(self, handle: CudaHandle) -> Tensor:
        found = arguments_of(handle, self.visible)
        assert self.exported is not None
        assert found[6] == self.visible.index("GPU-bbbb")
        return self.exported.detach()

    def synchronize(self) -> None:
        self.log.append("synchronize")
        if self.faulty:
            raise RuntimeError("an illegal memory access was encountered")

    def collect(self) -> None:
        self.log.append("collect")


class FakeShare(CudaShare):
    """A share on the fake."""

    cuda: ClassVar[FakeCuda] = FakeCuda()


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    FakeShare.cuda = FakeCuda()
    yield FakeShare.cuda
    FakeShare.cuda = FakeCuda()
    gc.collect()


@pytest.fixture
def address(run_dir: Path) -> Path:
    return run_dir / "weights.json"


@pytest.fixture
def owned(fake: FakeCuda, address: Path) -> Iterator[tuple[Any, FakeShare]]:
    model = built(config("qwen2"))
    share = FakeShare.create_or_adopt(model, address, version=V(1, 1), fused=True)
    assert fake.exported is not None
    yield model, share
    share.close(unlink=True)


def test_a_gpu_that_fails_under_a_reader_does_not_keep_the_writer_out(
    fake: FakeCuda, address: Path, owned: tuple[Any, FakeShare]
) -> None:
    model, owner = owned
    reader = FakeShare.attach(on_meta(model.config), address)
    reading = reader.reading()
    reading.__enter__()
    fake.faulty = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        reading.__exit__(None, None, None)
    fake.faulty = False
    with owner.writing(V(1, 2), patience_s=0.01):
        pass
    reader.close()


def test_both_sides_have_the_same_tensors(
    fake: FakeCuda, address: Path, owned: tuple[Any, FakeShare]
) -> None:
    model, owner = owned
    reading = on_meta(model.config)
    reader = FakeShare.attach(reading, address)
    assert reader.version == V(1, 1)
    assert torch.equal(logits(reading), logits(model))
    assert reading.lm_head.weight is reading.model.embed_tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    with owner.writing(V(1, 2)):
        optimizer.step()
    with reader.reading() as version:
        assert version == V(1, 2)
        assert torch.equal(logits(reading), logits(model))
    for one in (owner, reader):
        one.verify(Level.ALIASING)
    reader.close()
    assert fake.log[-1] == "collect"


def test_the_gpu_is_done_before_the_lock_is_free(
    fake: FakeCuda, address: Path, owned: tuple[Any, FakeShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, owner = owned
    reader = FakeShare.attach(on_meta(model.config), address)
    held: list[bool] = []
    monkeypatch.setattr(fake, "synchronize", lambda: held.append(is_free(owner.path)))
    with owner.writing(V(1, 2)):
        pass
    with reader.reading():
        pass
    with pytest.raises(ZeroDivisionError):
        fail(reader)
    assert held == [False, False, False]
    assert is_free(owner.path)
    reader.close()


def fail(reader: FakeShare) -> None:
    with reader.reading():
        raise ZeroDivisionError


def is_free(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_expandable_segments_are_refused_where_they_are_exported(fake: FakeCuda, address: Path) -> None:
    fake.expandable = True
    before = built(config("llama"))
    parameters = dict(before.named_parameters())
    with pytest.raises(WeightsMismatchError, match="expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"):
        FakeShare.create_or_adopt(before, address)
    assert not address.exists()
    assert all(parameters[name] is one for name, one in before.named_parameters())


def test_memory_that_the_allocator_does_not_know_is_refused() -> None:
    segments = [{"address": 1000, "total_size": 100, "is_expandable": False}]
    require_plain_memory(1000, segments)
    require_plain_memory(1099, segments)
    for address in (999, 1100):
        with pytest.raises(WeightsMismatchError, match="unknown to torch's allocator"):
            require_plain_memory(address, segments)


def test_a_handle_survives_json_and_another_order_of_gpus() -> None:
    arguments = fifteen(torch.zeros(64, dtype=torch.uint8), 1)
    handle = handle_of(arguments, GPUS)
    assert handle.gpu == "GPU-bbbb"
    again = msgspec.json.decode(msgspec.json.encode(handle), type=CudaHandle)
    assert arguments_of(again, GPUS) == arguments
    rewritten = arguments_of(again, GPUS[::-1])
    assert rewritten[6] == 0
    assert rewritten[:6] + rewritten[7:] == arguments[:6] + arguments[7:]
    with pytest.raises(MissingError, match="GPU-bbbb"):
        arguments_of(again, ["GPU-aaaa"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: a[:-1],
        lambda a: (*a[:5], torch.float32, *a[6:]),
        lambda a: (*a[:3], 4, *a[4:]),
        lambda a: (*a[:1], torch.Size([32]), *a[2:]),
    ],
)
def test_what_is_no_flat_tensor_is_no_handle(wrong: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    with pytest.raises(WeightsMismatchError):
        handle_of(wrong(fifteen(torch.zeros(64, dtype=torch.uint8), 1)), GPUS)


def test_a_reader_that_does_not_see_the_gpu_is_told(
    fake: FakeCuda, address: Path, owned: tuple[Any, FakeShare]
) -> None:
    fake.visible = ["GPU-aaaa"]
    reading = on_meta(owned[0].config)
    with pytest.raises(MissingError, match="CUDA_VISIBLE_DEVICES"):
        FakeShare.attach(reading, address)
    assert all(parameter.is_meta for parameter in reading.parameters())


def test_a_damaged_handle_is_a_mismatch(address: Path, owned: tuple[Any, FakeShare]) -> None:
    model, owner = owned
    assert owner._memory is not None
    for wrong in (b"{}", b'{"gpu": "x"'):
        owner._memory[HANDLE_AT : HANDLE_AT + 1024] = wrong.ljust(1024, b"\0")
        with pytest.raises(WeightsMismatchError, match="handle"):
            FakeShare.attach(on_meta(model.config), address)


def claim_for(share: WeightShare, owner: SegmentOwner) -> None:
    os.pwrite(share._segment.fd, HEADER.pack(MAGIC, LAYOUT, share.nonce.encode(), *owner, 0), 0)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def owner_of(process: "subprocess.Popen[bytes]") -> SegmentOwner:
    fields = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
    return SegmentOwner(process.pid, int(fields[19]), SegmentOwner.current().namespace)


def test_handles_of_a_dead_owner_are_refused(
    address: Path, owned: tuple[Any, FakeShare], sleeper: "subprocess.Popen[bytes]"
) -> None:
    model, owner = owned
    claim_for(owner, owner_of(sleeper))
    reader = FakeShare.attach(on_meta(model.config), address)
    with reader.reading():
        pass
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(SegmentGoneError, match="its owner is dead"):
        reader.reading().__enter__()
    reader.close()
    reading = on_meta(model.config)
    with pytest.raises(SegmentGoneError, match="its owner is dead"):
        FakeShare.attach(reading, address)
    assert all(parameter.is_meta for parameter in reading.parameters())


def test_an_heir_makes_a_new_segment(
    address: Path, owned: tuple[Any, FakeShare], sleeper: "subprocess.Popen[bytes]"
) -> None:
    _, owner = owned
    claim_for(owner, owner_of(sleeper))
    with pytest.raises(SegmentInUseError, match=str(sleeper.pid)):
        FakeShare.create_or_adopt(built(config("qwen2")), address)
    sleeper.kill()
    sleeper.wait()
    heir = FakeShare.create_or_adopt(built(config("qwen2"), seed=1), address, version=V(2, 0), fused=True)
    assert not heir.adopted
    assert heir.path != owner.path
    assert not owner.path.exists()
    assert owner.is_replaced()
    assert heir.verify(Level.ALIASING).version == V(2, 0)
    heir.close(unlink=True)


def test_a_reader_of_another_backend_is_told(address: Path, owned: tuple[Any, FakeShare]) -> None:
    with pytest.raises(WeightsMismatchError, match=r"backend: .* is not shared as weights"):
        WeightShare.attach(on_meta(owned[0].config), address)


def test_a_model_on_the_cpu_is_refused_by_the_real_one(address: Path) -> None:
    with pytest.raises(WeightsMismatchError, match="device: the model must be on a GPU"):
        CudaShare.create_or_adopt(built(config("llama")), address)
    with pytest.raises(WeightsMismatchError, match="device"):
        TorchCuda().allocate(8, torch.zeros(1))
