"""Sharing within one process; `test_processes` uses several."""

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.services.process.open_descriptors import opened
from tests.trainer.weights.conftest import Shares
from tests.trainer.weights.models import TOKENS, logits, on_meta
from torch import nn
from transformers import AutoModelForCausalLM

from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.errors import MissingError, SegmentGoneError, SegmentInUseError, WeightsMismatchError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.weights.posix_shm import WeightShare

V = PolicyVersion


def policy(seed: int = 0, **changes: Any) -> Any:
    return build_policy(ModelConfig(**changes), seed)


@pytest.mark.parametrize("tie", [False, True])
def test_owner_and_reader_compute_the_same_on_the_same_bytes(shares: Shares, tie: bool) -> None:
    model = policy(tie_embeddings=tie)
    before = logits(model)
    owner = shares.create(model, V(1, 7))
    assert torch.equal(logits(model), before)
    reading = on_meta(model.config, model.dtype)
    reader = shares.attach(reading)
    assert reader.version == V(1, 7)
    assert not any(tensor.is_meta for tensor in [*reading.parameters(), *reading.buffers()])
    assert not any(parameter.requires_grad for parameter in reading.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (reading.lm_head.weight is reading.model.embed_tokens.weight) is tie
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tie
    assert torch.equal(logits(reading), before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8, 11):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        with owner.writing(V(1, step)):
            optimizer.step()
        optimizer.zero_grad()
        with reader.reading() as version:
            assert version == V(1, step)
            assert torch.equal(logits(reading), logits(model))
            assert not torch.equal(logits(reading), before)


def test_bfloat16_is_shared_as_it_is(shares: Shares) -> None:
    config = policy().config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    shares.create(model)
    reading = on_meta(model.config, model.dtype)
    shares.attach(reading)
    assert reading.lm_head.weight.dtype == torch.bfloat16
    assert reading.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(logits(reading), logits(model))


def test_modules_in_lists_and_persistent_buffers_are_reached(shares: Shares) -> None:
    def build() -> nn.Module:
        inner = nn.ModuleList([nn.Linear(3, 2), nn.BatchNorm1d(2)])
        return nn.ModuleDict({"list": nn.ModuleList([inner])})

    model = build()
    owner = shares.create(model)
    names = {spec.name for spec in owner.manifest().tensors}
    assert names == set(model.state_dict())
    with torch.device("meta"):
        reading = build()
    shares.attach(reading)
    with owner.writing(V(0, 1)), torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    for name, tensor in reading.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def changed_config(model: Any, **changes: Any) -> Any:
    for key, value in changes.items():
        setattr(model.config, key, value)
    return model


def test_what_is_not_the_same_model_is_refused(shares: Shares) -> None:
    model = policy()
    shares.create(model)
    wrong: list[tuple[Any, str, str]] = [
        (policy(hidden_size=32), "model.embed_tokens.weight", "shape"),
        (policy().to(torch.bfloat16), "model.embed_tokens.weight", "dtype"),
        (policy(layers=1), "model.layers.1.input_layernorm.weight|model.layers.1", "in the segment"),
        (policy(layers=3), "model.layers.2", "not in the segment"),
        (policy(tie_embeddings=True), "lm_head.weight", "in the segment"),
        (changed_config(policy(), rms_norm_eps=1e-5), "config.rms_norm_eps", "1e-05"),
        (
            changed_config(policy(), rope_parameters={"rope_type": "default", "rope_theta": 5e6}),
            "config.rope_parameters",
            "5000000",
        ),
    ]
    for other, tensor, problem in wrong:
        before = dict(other.named_parameters())
        with pytest.raises(WeightsMismatchError) as caught:
            shares.attach(other)
        assert any(part in str(caught.value) for part in tensor.split("|"))
        assert problem in str(caught.value)
        after = dict(other.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items())


def test_a_rounded_rope_table_is_refused(shares: Shares) -> None:
    """`model.to(bfloat16)` rounds the table too; a reader that computes it anew would turn by other angles."""
    shares.create(policy().to(torch.bfloat16))
    model = AutoModelForCausalLM.from_config(policy().config, dtype=torch.bfloat16).eval()
    with pytest.raises(WeightsMismatchError, match=r"rotary_emb\.inv_freq: was computed as torch.bfloat16"):
        shares.attach(model)


def test_a_buffer_that_nobody_can_compute_is_refused(shares: Shares) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = nn.Buffer(torch.arange(4.0), persistent=False)

    shares.create(Odd())
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(WeightsMismatchError, match="table: is on meta and cannot be computed"):
        shares.attach(model)
    shares.attach(Odd())


def test_hidden_views_are_refused(shares: Shares) -> None:
    model = policy()
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())
    with pytest.raises(WeightsMismatchError, match=r"lm_head.weight: shares the storage"):
        shares.create(model)
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 32).T)
    with pytest.raises(WeightsMismatchError, match=r"lm_head.weight: stride"):
        shares.create(model)
    assert not shares.address.exists()


def test_a_reader_without_an_owner_is_told_to_try_again(shares: Shares) -> None:
    with pytest.raises(SegmentGoneError, match="no address"):
        shares.attach(policy())
    owner = shares.create(policy())
    stale = shares.address.read_bytes()
    owner.close(unlink=True)
    assert not shares.address.exists()
    shares.address.write_bytes(stale)
    with pytest.raises(SegmentGoneError, match="No such file"):
        shares.attach(policy())
    address = msgspec.json.decode(stale)
    owner = shares.create(policy())
    shares.address.write_bytes(msgspec.json.encode({"path": str(owner.path), "nonce": address["nonce"]}))
    with pytest.raises(SegmentGoneError, match="nonce"):
        shares.attach(policy())
    segment_file.write_address(shares.address, owner._segment)


def test_a_living_owner_keeps_its_segment(shares: Shares) -> None:
    owner = shares.create(policy())
    with pytest.raises(SegmentInUseError, match=f"process {os.getpid()}"):
        shares.create(policy(1))
    assert segment_file.sweep(shares.address) == []
    assert owner.path.exists()


def test_a_process_takes_over_what_it_has_closed_itself(shares: Shares) -> None:
    """A notebook: the first training was interrupted, the next begins in the same process."""
    owner = shares.create(policy(), V(1, 3))
    reading = on_meta(policy().config)
    reader = shares.attach(reading)
    with pytest.raises(KeyboardInterrupt), owner.writing(V(1, 4)):
        raise KeyboardInterrupt
    owner.close()
    assert not reader.owner_lives()
    model = policy(1)
    heir = shares.create(model, V(2, 0))
    assert heir.adopted
    assert heir.path == reader.path
    with reader.reading() as version:
        assert version == V(2, 0)
        assert torch.equal(logits(reading), logits(model))
    owner.close()
    assert reader.owner_lives()
    with pytest.raises(SegmentInUseError, match=f"process {os.getpid()}"):
        shares.create(policy(2))


@pytest.mark.extended
def test_segments_are_private_and_readers_cannot_write(shares: Shares) -> None:
    model = policy()
    owner = shares.create(model)
    assert owner.path.stat().st_mode & 0o777 == 0o600
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from rolloutmq.schemas.config.run import ModelConfig\n"
        "from rolloutmq.trainer.policy.model import build_policy\n"
        "from rolloutmq.trainer.weights.posix_shm import WeightShare\n"
        "model = build_policy(ModelConfig(), 0)\n"
        "share = WeightShare.attach(model, Path(sys.argv[1]))\n"
        "print('attached', flush=True)\n"
        "model.lm_head.weight.fill_(0.0)\n"
    )
    before = model.lm_head.weight.clone()
    done = subprocess.run([sys.executable, "-c", script, shares.address], capture_output=True, text=True)
    assert done.stdout == "attached\n"
    assert done.returncode == -11
    assert torch.equal(model.lm_head.weight, before)


def test_replaced_tells_of_another_segment(shares: Shares, tmp_path: Path) -> None:
    model = policy()
    shares.create(model)
    reader = shares.attach(on_meta(model.config, model.dtype))
    assert not reader.is_replaced()
    other = tmp_path / "other.json"
    share = WeightShare.create_or_adopt(policy(1), other)
    mine = shares.address.read_bytes()
    shares.address.write_bytes(other.read_bytes())
    assert reader.is_replaced()
    shares.address.write_bytes(mine)
    share.close(unlink=True)


def test_too_little_memory_is_said_before_it_is_used() -> None:
    with pytest.raises(MissingError, match="shared memory"):
        segment_file.create("weights", 1 << 50)


def test_what_cannot_be_mapped_is_removed(shares: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    create = segment_file.create

    def noted(kind: str, nbytes: int) -> segment_file.SegmentFile:
        segment = create(kind, nbytes)
        made.append(segment.path)
        return segment

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = opened()
    monkeypatch.setattr(segment_file, "create", noted)
    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(OSError, match="Cannot allocate"):
        shares.create(policy())
    (path,) = made
    assert not path.exists()
    assert opened() == before


def test_a_damaged_manifest_is_a_mismatch(shares: Shares) -> None:
    owner = shares.create(policy())
    offset, nbytes = owner._lock.manifest_range
    for place in [(0, nbytes), (offset, nbytes + 1), (offset, 0), (offset, -1), (offset, nbytes - 1)]:
        owner._lock.place_manifest(*place)
        with pytest.raises(WeightsMismatchError, match="manifest"):
            shares.attach(policy())
    owner._lock.place_manifest(offset, nbytes)
    shares.attach(policy())
