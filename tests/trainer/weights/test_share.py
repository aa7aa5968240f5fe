"""The levels of verification, within a process and between two."""

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from tests.trainer.weights.conftest import Shares
from tests.trainer.weights.models import ROPE, TOKENS, built, config, logits, on_meta
from torch import nn

from rolloutmq.schemas.errors import WeightsMismatchError, WeightsSilentError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.share import Level, Proof, SharedWeights
from rolloutmq.trainer.weights.verify import digest

V = PolicyVersion


@contextmanager
def repeating(act: Callable[[], None]) -> Iterator[None]:
    """Do something again and again in a thread meanwhile, as another process would."""
    ended = threading.Event()

    def acts() -> None:
        while not ended.wait(0.002):
            act()

    thread = threading.Thread(target=acts)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def turns_of(share: WeightShare, *, owner: bool) -> Callable[[], None]:
    """What a side does all day: it writes, or it reads."""

    def turn() -> None:
        with share.writing(V(0, 1)) if owner else share.reading():
            pass

    return turn


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_both_sides_prove_the_same(shares: Shares, family: str) -> None:
    model = built(config(family))
    owner: SharedWeights = shares.create(model, V(1, 2), fused=True)
    reader: SharedWeights = shares.attach(on_meta(model.config))
    found = []
    for one, other, is_owner in [(owner, reader, False), (reader, owner, True)]:
        for level in (Level.MANIFEST, Level.ALIASING):
            assert one.verify(level).level == level
        with repeating(turns_of(other, owner=is_owner)):  # type: ignore[arg-type]
            found.append(one.verify(Level.LOGITS, inputs=TOKENS, patience_s=5.0))
    mine, theirs = found
    assert mine.answered_s is not None
    assert (mine.version, theirs.version) == (V(1, 2), V(0, 1))
    with pytest.raises(WeightsMismatchError, match="version"):
        mine.require_same(theirs)
    assert mine.digests == theirs.digests
    assert set(mine.digests) == {spec.name for spec in owner.manifest().tensors}
    assert mine.logits == theirs.logits


@pytest.mark.parametrize("rope", ["dynamic", "yarn"])
def test_a_table_that_follows_the_input_is_no_mismatch(shares: Shares, rope: str) -> None:
    model = built(config("llama", rope_parameters=ROPE[rope]))
    owner = shares.create(model)
    logits(model, torch.ones(1, 80, dtype=torch.long))
    owner.verify(Level.ALIASING)
    shares.attach(on_meta(model.config))


def test_nobody_answers_for_a_side_that_takes_no_turn(shares: Shares) -> None:
    owner = shares.create(built(config("llama")))
    with pytest.raises(WeightsSilentError, match="a reader did not answer within"):
        owner.verify(Level.NONCE, patience_s=0.02)
    reader = shares.attach(on_meta(config("llama")))
    with pytest.raises(WeightsSilentError, match="the owner did not answer within"):
        reader.verify(Level.NONCE, patience_s=0.02)
    with owner.writing(V(0, 1)):
        pass
    with pytest.raises(WeightsSilentError):  # that was the answer to another question
        reader.verify(Level.NONCE, patience_s=0.02)


def test_two_readers_ask_one_after_the_other(shares: Shares) -> None:
    owner = shares.create(built(config("llama")))
    readers = [shares.attach(on_meta(config("llama"))) for _ in range(3)]
    answered = []
    with repeating(turns_of(owner, owner=True)):
        threads = [
            threading.Thread(target=lambda one=one: answered.append(one.verify(Level.NONCE, patience_s=5.0)))
            for one in readers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answered) == 3


def replaced(model: nn.Module, name: str) -> None:
    path, _, leaf = name.rpartition(".")
    old = model.get_parameter(name)
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(old.detach().clone())


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_a_parameter_that_lies_elsewhere_is_named(shares: Shares, name: str) -> None:
    model = built(config("llama"))
    owner = shares.create(model)
    owner.verify(Level.ALIASING)
    replaced(model, name)
    owner.verify(Level.MANIFEST)
    with pytest.raises(WeightsMismatchError, match=f"{name}: is not in the shared memory"):
        owner.verify(Level.ALIASING)


def test_a_tie_that_broke_is_named(shares: Shares) -> None:
    model = built(config("qwen2"))
    owner = shares.create(model)
    replaced(model, "lm_head.weight")
    with pytest.raises(
        WeightsMismatchError, match=r"lm_head.weight: is tied to model.embed_tokens.weight in"
    ):
        owner.verify(Level.MANIFEST)


def test_logits_need_something_to_compute_them_from(shares: Shares) -> None:
    owner = shares.create(built(config("llama")))
    with (
        repeating(turns_of(shares.attach(on_meta(config("llama"))), owner=False)),
        pytest.raises(ValueError, match="inputs"),
    ):
        owner.verify(Level.LOGITS, patience_s=5.0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_digests_see_a_bit_and_an_exchange(dtype: torch.dtype, exact: bool) -> None:
    tensor = torch.randint(0, 200, (7, 5)).to(dtype)
    before = digest(tensor, exact=exact)
    assert digest(tensor.clone(), exact=exact) == before
    other = tensor.clone()
    other.view(torch.uint8).view(-1)[-1] ^= 1
    assert digest(other, exact=exact) != before
    if not torch.equal(tensor[0], tensor[1]):
        assert digest(tensor[torch.tensor([1, 0, 2, 3, 4, 5, 6])], exact=exact) != before


def test_a_difference_is_told_by_its_tensor() -> None:
    mine = Proof(Level.DIGESTS, V(0, 1), 2, 8, digests={"a": "1", "b": "2"})
    mine.require_same(copy.deepcopy(mine))
    for other, named in [
        (Proof(Level.DIGESTS, V(0, 1), 2, 8, digests={"a": "1", "b": "3"}), "b: holds 2 here, 3 there"),
        (Proof(Level.DIGESTS, V(0, 1), 2, 8, digests={"a": "1"}), "b: holds 2 here, nothing there"),
        (Proof(Level.LOGITS, V(0, 1), 2, 8, digests=mine.digests, logits="x"), "logits"),
    ]:
        with pytest.raises(WeightsMismatchError, match=named):
            mine.require_same(other)


READER = """
import sys, threading
from pathlib import Path
import msgspec
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.share import Level
from tests.trainer.weights.models import TOKENS, config, on_meta
share = WeightShare.attach(on_meta(config("qwen3")), Path(sys.argv[1]))
print("attached", flush=True)
for line in sys.stdin:
    proof = share.verify(Level.LOGITS, inputs=TOKENS, patience_s=20.0, exact=True)
    print(msgspec.json.encode(proof).decode(), flush=True)
"""


@pytest.fixture
def reader(shares: Shares) -> Iterator["subprocess.Popen[str]"]:
    shares.create(built(config("qwen3")), V(0, 1), fused=True)
    command = [sys.executable, "-c", READER, str(shares.address)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        yield process
        process.kill()


def test_two_processes_prove_the_same_after_every_step(
    shares: Shares, reader: "subprocess.Popen[str]"
) -> None:
    owner = shares.opened[0]
    model = owner._model
    assert model is not None
    assert reader.stdin is not None
    assert reader.stdout is not None
    assert reader.stdout.readline() == "attached\n"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in (2, 3):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        with owner.writing(V(0, step)):
            optimizer.step()
        reader.stdin.write("prove\n")
        reader.stdin.flush()
        # Both ask and both answer while they wait for the other.
        mine = owner.verify(Level.LOGITS, inputs=TOKENS, patience_s=20.0, exact=True)
        with repeating(owner._answer):
            theirs = msgspec.json.decode(reader.stdout.readline(), type=Proof)
        mine.require_same(theirs)
        assert mine.version == V(0, step)
        assert mine.logits == digest(logits(model).contiguous(), exact=True)
        seen.append(mine)
    assert all(seen[0].digests[name] != seen[1].digests[name] for name in seen[0].digests)
