"""Owner and readers as processes that die: reads are whole, and leftovers are adopted or removed."""

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
from rolloutmq.schemas.errors import WeightsMismatchError, WeightsTornError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights import posix_shm
from rolloutmq.trainer.weights.posix_shm import WeightShare

V = PolicyVersion

OWNER = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from rolloutmq.schemas.wire.envelope import PolicyVersion as V
from rolloutmq.trainer.weights.posix_shm import WeightShare

torch.set_num_threads(1)
address, incarnation, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = nn.ModuleList([nn.Linear(width, width) for _ in range(8)])

@torch.no_grad()
def fill(value, count=16):
    for parameter in list(model.parameters())[:count]:
        parameter.fill_(value)

fill(0.0)
share = WeightShare.create_or_adopt(model, address, version=V(incarnation, 0))
print(share.path, share.adopted, flush=True)
for line in sys.stdin:
    order, number = line.split()
    if order == "write":
        for step in range(1, int(number) + 1):
            with share.writing(V(incarnation, step)):
                fill(float(step))
            time.sleep(0.001)  # an optimizer has other things to do as well
        print("done", flush=True)
    elif order == "tear":
        with share.writing(V(incarnation, int(number))):
            fill(float(number), 8)
            print("torn", flush=True)
            sys.stdin.readline()
share.close(unlink=True)
"""


class Owner:
    """A process that shares the weights of a small model and writes them when told to."""

    def __init__(self, address: Path, incarnation: int = 0, width: int = 64) -> None:
        arguments = [sys.executable, "-c", OWNER, str(address), str(incarnation), str(width)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        path, adopted = self.line().split()
        self.path = Path(path)
        self.adopted = adopted == "True"

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the owner ended with {self.process.wait()}"
        return line

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        """Close its input, which ends it in order."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Run:
    """The address file of a run, its owners, and readers in this process."""

    def __init__(self, address: Path) -> None:
        self.address = address
        self._owners: list[Owner] = []
        self._shares: list[WeightShare] = []

    def own(self, incarnation: int = 0, width: int = 64) -> Owner:
        owner = Owner(self.address, incarnation, width)
        self._owners.append(owner)
        return owner

    def read(self, width: int = 64) -> tuple[nn.Module, WeightShare]:
        with torch.device("meta"):
            model = nn.ModuleList([nn.Linear(width, width) for _ in range(8)])
        share = WeightShare.attach(model, self.address)
        self._shares.append(share)
        return model, share

    def close(self) -> None:
        for owner in self._owners:
            if owner.process.poll() is None:
                owner.kill()
        for share in self._shares:
            share.close()


@pytest.fixture
def run(run_dir: Path) -> Iterator[Run]:
    made = Run(run_dir / "weights.json")
    yield made
    made.close()
    gc.collect()
    segment_file.sweep(made.address)


def test_a_reader_that_is_stopped_in_mid_pass_does_not_keep_an_heir_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(posix_shm, "ADOPT_PATIENCE_S", 0.05)
    owner = run.own()
    _, stopped = run.read()
    stopped.reading().__enter__()  # and never goes on
    owner.kill()
    model = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
    heir = WeightShare.create_or_adopt(model, run.address, version=V(1, 0))
    assert (heir.adopted, heir.path != owner.path, owner.path.exists()) == (False, True, False)
    assert f"reader {os.getpid()} holds it" in caplog.text
    assert stopped.is_replaced()
    _, reader = run.read()
    with reader.reading() as version:
        assert version == V(1, 0)
    heir.close(unlink=True)


def values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in set(parameter.flatten().tolist())}


def test_a_reader_sees_each_write_whole(run: Run) -> None:
    owner = run.own()
    model, share = run.read()
    owner.order("write 400")
    seen = set()
    while (last := share.version.step) < 400:
        with share.reading() as version:
            assert version.step >= last
            assert values(model) == {float(version.step)}
        seen.add(version.step)
    assert owner.line() == "done"
    assert len(seen) > 10
    owner.end()
    assert not owner.path.exists()
    with share.reading() as version:
        assert version == V(0, 400)
        assert values(model) == {400.0}


def test_what_a_killed_writer_left_is_refused_and_restored(run: Run) -> None:
    owner = run.own()
    model, share = run.read()
    owner.order("write 3")
    owner.line()
    owner.order("tear 4")
    owner.line()
    assert not share.is_torn()  # somebody is at work on them
    owner.kill()
    assert share.is_torn()
    assert values(model) == {3.0, 4.0}
    with pytest.raises(WeightsTornError, match=r"since version 0\.3"):
        share.reading().__enter__()
    heir = run.own(incarnation=1)
    assert heir.adopted
    assert heir.path == owner.path
    assert not share.is_replaced()
    with share.reading() as version:
        assert version == V(1, 0)
        assert values(model) == {0.0}
    heir.order("write 2")
    heir.line()
    with share.reading() as version:
        assert version == V(1, 2)
        assert values(model) == {2.0}
    heir.end()
    assert not heir.path.exists()
    assert not run.address.exists()


@pytest.mark.extended
def test_an_heir_with_another_model_makes_a_new_segment(run: Run) -> None:
    owner = run.own()
    _, share = run.read()
    owner.kill()
    heir = run.own(incarnation=1, width=32)
    assert not heir.adopted
    assert heir.path != owner.path
    assert not owner.path.exists()
    assert share.is_replaced()
    model, _ = run.read(width=32)
    assert values(model) == {0.0}
    heir.end()


def test_a_segment_is_swept_when_nobody_needs_it(run: Run) -> None:
    owner = run.own()
    assert segment_file.sweep(run.address) == []
    model, share = run.read()
    owner.kill()
    assert segment_file.sweep(run.address) == []  # a reader still has it, and an heir may come
    assert owner.path.exists()
    share.close()
    del model
    gc.collect()
    assert segment_file.sweep(run.address) == [owner.path]
    assert not owner.path.exists()
    assert not run.address.exists()
    assert segment_file.sweep(run.address) == []


def test_an_attach_that_fails_holds_nothing(run: Run) -> None:
    owner = run.own()
    with pytest.raises(WeightsMismatchError):
        run.read(width=32)
    owner.kill()
    assert segment_file.sweep(run.address) == [owner.path]
