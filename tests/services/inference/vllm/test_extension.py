"""The extension inside vLLM, with a simulated scheduler: when it samples, and when it aborts requests."""

import contextlib
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.services.inference.vllm.support.child import child
from tests.services.inference.vllm.support.lent import model_of
from tests.services.inference.vllm.test_weight_matching import as_vllm_has_it
from tests.trainer.weights.test_cuda_ipc import FakeCuda

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.cuda_ipc import CudaShare
from rolloutmq.trainer.weights.posix_shm import WeightShare

V = PolicyVersion
OURS = "rolloutmq.services.inference.vllm"
WAIT_S = 30.0


class EngineCore:
    """The part of vLLM's engine that the extension knows."""

    batched = False

    def __init__(self) -> None:
        self.scheduler: Any = Scheduler()
        self.sampled: list[str] = []
        self.aborted: list[str] = []
        self._weight_version = ""
        self.step_fn = self.step_with_batch_queue if self.batched else self.step

    def step(self) -> tuple[dict[int, Any], bool]:
        if self.scheduler.waiting:
            self.sampled.append(self._weight_version)
        return {}, True

    def step_with_batch_queue(self) -> tuple[dict[int, Any], bool]:
        if self.scheduler.waiting:
            self.sampled.append("without a lock")
        return {}, True

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        return [method, timeout, args, kwargs]

    def _send_abort_outputs(self, ended: list[str]) -> None:
        self.aborted += ended


class Worker:
    """The part of vLLM's worker that the extension knows."""

    def execute_model(self, scheduled: str) -> str:
        return f"did {scheduled}"


class Scheduler:
    def __init__(self) -> None:
        self.waiting = ["one"]
        self.resets = 0

    def has_requests(self) -> bool:
        return bool(self.waiting)

    def finish_requests(self, _which: None, _status: str) -> list[str]:
        ended, self.waiting = self.waiting, []
        return ended

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.resets += reset_running_requests


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The extension, loaded into this process beside a vLLM that is made up."""
    core = type("EngineCore", (EngineCore,), {})

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    factory = SimpleNamespace(register_engine=lambda *_: None)
    bases = {name: type(name, (), {}) for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    layers = ModuleType("vllm.model_executor.layers.utils")
    for name in (
        "",
        ".v1",
        ".v1.engine",
        ".v1.worker",
        ".model_executor",
        ".model_executor.model_loader",
        ".distributed",
    ):
        module(f"vllm{name}")
    module("vllm.model_executor.layers", utils=layers)
    module("vllm.model_executor.layers.utils")
    module("vllm.logger", init_logger=logging.getLogger)
    module("vllm.v1.engine.core", EngineCore=core)
    module("vllm.v1.worker.gpu_worker", Worker=type("Worker", (Worker,), {}))
    module("vllm.v1.request", RequestStatus=SimpleNamespace(FINISHED_ABORTED="aborted"))
    module("vllm.distributed.weight_transfer", WeightTransferEngineFactory=factory)
    module("vllm.distributed.weight_transfer.base", WeightTransferEngine=object, **bases)
    module(
        "vllm.model_executor.model_loader.reload",
        finalize_layerwise_reload=None,
        initialize_layerwise_reload=None,
    )
    for name in ("extension", "weight_transfer"):
        monkeypatch.delitem(sys.modules, f"{OURS}.{name}", raising=False)
    found: Any = importlib.import_module(f"{OURS}.extension")
    found.core = core
    monkeypatch.setattr(found, "WATCH_S", 0.0)
    yield found
    if found.reader.share is not None:
        found.reader.share.close()
    vars(found.reader).clear()
    for name in ("extension", "weight_transfer"):
        sys.modules.pop(f"{OURS}.{name}", None)


class Lent:
    """A trainer's segment and a worker of vLLM that is to have it."""

    def __init__(
        self, root: Path, extension: Any, tokenizer: str = "", kind: type[WeightShare] = WeightShare
    ) -> None:
        self.kind = kind
        self.address = root / "weights.json"
        self.model = model_of("qwen2")
        self.share = self.shared(self.model, tokenizer)
        runner = SimpleNamespace(get_model=lambda: self.theirs)
        facts = SimpleNamespace(hf_config=self.model.config)
        self.theirs: Any = as_vllm_has_it(self.model)
        parallel = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
        self.worker = SimpleNamespace(model_runner=runner, model_config=facts, vllm_config=parallel)
        self.extension = extension

    def shared(self, model: Any, tokenizer: str = "") -> WeightShare:
        return self.kind.create_or_adopt(
            model, self.address, version=V(1, 0), fused=True, tokenizer=tokenizer
        )

    def attach(self, core: Any, *more: str) -> dict[str, Any]:
        core.collective_rpc("attach_weights")
        said: dict[str, Any] = self.extension.SharedWeights.attach_weights(
            self.worker, str(self.address), *more
        )
        return said


@pytest.fixture
def lent(tmp_path: Path, extension: Any) -> Iterator[Lent]:
    made = Lent(tmp_path, extension)
    yield made
    made.share.close(unlink=True)
    del made.model, made.theirs


def test_a_step_is_one_read(lent: Lent, extension: Any) -> None:
    core = extension.core()
    assert lent.attach(core)["version"] == "1.0"
    core.step()
    with lent.share.writing(V(1, 1)):
        pass
    core.step()
    assert core.sampled == ["1.0", "1.1"]
    assert core.scheduler.resets == 2


def test_steps_are_counted_while_there_is_something_to_do(
    lent: Lent, extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted() -> int:
        told: int = extension.SharedWeights.steps_taken(lent.worker)["steps"]
        return told

    core = extension.core()
    lent.attach(core)
    for _ in range(3):
        core.step()
    assert counted() == 3
    monkeypatch.setattr(extension, "PATIENCE_S", 0.0)
    with lent.share.writing(V(1, 1)):
        core.step()
    assert counted() == 4, "who waits for the weights does not hang"
    core.scheduler.waiting = []
    core.step()
    assert counted() == 4


def test_another_segment_that_does_not_fit_is_refused_for_good(lent: Lent, extension: Any) -> None:
    """Not once, and then the weights that were there before."""
    core = extension.core()
    lent.attach(core)
    extension.WATCH_S = 3600.0
    core.step()
    assert core.sampled == ["1.0"]
    lent.share.close(unlink=True)
    lent.share = lent.shared(model_of("qwen3"))
    extension.reader._look_at = 0.0
    for number in range(1, 4):
        core.scheduler.waiting = ["another"]
        core.step()
        assert len(core.aborted) == number
    assert core.sampled == ["1.0"]
    # One that fits is followed.
    lent.share.close(unlink=True)
    lent.share = lent.shared(model_of("qwen2", seed=4))
    core.scheduler.waiting = ["another"]
    core.step()
    assert core.sampled == ["1.0", "1.0"]


def test_the_tokenizer_is_proven_before_anything_is_bound_and_ever_after(
    tmp_path: Path, extension: Any
) -> None:
    lent, core = Lent(tmp_path, extension, tokenizer="a" * 64), extension.core()
    before = [one.data_ptr() for one in lent.theirs.parameters()]
    assert "tokenizer" in lent.attach(core, "b" * 64)["error"]
    assert [one.data_ptr() for one in lent.theirs.parameters()] == before
    assert "segment" in lent.attach(core, "a" * 64)
    core.step()
    # The trainer comes back with a model of the same shapes, that reads other tokens.
    lent.share.close(unlink=True)
    lent.share = lent.shared(model_of("qwen2"), "b" * 64)
    core.step()
    assert core.sampled == ["1.0"]
    assert core.aborted == ["one"]
    lent.share.close(unlink=True)


def test_a_writer_that_stops_in_mid_write_is_waited_for_so_long(
    lent: Lent, extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "PATIENCE_S", 0.01)
    core = extension.core()
    lent.attach(core)
    with stopped(lent.share):
        core.step()
        assert (core.sampled, core.aborted) == ([], []), "a write takes its time"
        monkeypatch.setattr(extension, "GIVE_UP_S", 0.0)
        core.step()
        assert (core.sampled, core.aborted) == ([], ["one"])
    core.scheduler.waiting = ["another"]
    core.step()
    assert core.sampled == ["1.1"]
    # What was waited for is no part of the next wait.
    monkeypatch.setattr(extension, "GIVE_UP_S", 60.0)
    with stopped(lent.share):
        core.step()
    assert core.aborted == ["one"]


@contextlib.contextmanager
def stopped(share: WeightShare) -> Iterator[None]:
    """Keep a writer in the middle of its write."""
    inside, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with share.writing(V(1, 1)):
            inside.set()
            go_on.wait(WAIT_S)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert inside.wait(WAIT_S)
        yield
    finally:
        go_on.set()
        writer.join(WAIT_S)


def test_a_call_goes_to_the_worker_as_it_came(extension: Any) -> None:
    """vLLM passes on as many arguments as the method has parameters with a name."""
    core = extension.core()
    names = [
        list(inspect.signature(one).parameters) for one in (core.collective_rpc, EngineCore().collective_rpc)
    ]
    assert names[0] == names[1]
    assert core.collective_rpc("do", 1.0, ("x",), {"y": 2}) == ["do", 1.0, ("x",), {"y": 2}]


def test_a_worker_without_its_scheduler_is_refused(lent: Lent, extension: Any) -> None:
    """In a process of workers alone nobody asks but from outside: no step there takes the lock."""
    said = extension.SharedWeights.attach_weights(lent.worker, str(lent.address))
    assert "must share one process" in said["error"]
    assert "segment" in lent.attach(extension.core())


def test_an_engine_of_several_steps_at_a_time_is_refused(lent: Lent, extension: Any) -> None:
    extension.core.batched = True
    core = extension.core()
    assert "one step at a time" in lent.attach(core)["error"]
    core.step_fn()
    assert (core.sampled, core.aborted) == ([], ["one"])
    # Weights that were sent change only while it is paused.
    extension.received.whole = True
    core.scheduler.waiting = ["another"]
    core.step_fn()
    assert (core.sampled, core.aborted) == (["without a lock"], ["one"])


def test_memory_of_the_owner_on_a_gpu_is_mapped_alike(
    tmp_path: Path, extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaShare, "cuda", FakeCuda())
    lent, core = Lent(tmp_path, extension, kind=CudaShare), extension.core()
    said = lent.attach(core)
    assert said["segment"].endswith("-gpuweights")
    with lent.share.writing(V(1, 1)), torch.no_grad():
        lent.model.model.norm.weight.fill_(3.0)
    core.step()
    assert core.sampled == ["1.1"]
    assert bool((lent.theirs.get_parameter("model.norm.weight") == 3.0).all())
    lent.share.close(unlink=True)


def test_a_worker_in_a_process_of_its_own_counts_its_passes(extension: Any) -> None:
    worker = extension.Worker()
    assert worker.execute_model("this") == "did this"
    assert extension.SharedWeights.steps_taken(worker) == {"steps": 1}


PARENT = """
import os, subprocess, sys
server = os.getpid()
code = "import os, ctypes, signal, sys\\nfrom pathlib import Path\\n" + sys.argv[1]
code += "\\nend_with_parent()\\nprint('lives', flush=True)"
for levels in (1, 2, 3):
    command = [sys.executable, "-c", code]
    for _ in range(levels - 1):
        above = f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode % 256)"
        command = [sys.executable, "-c", above]
    environ = {**os.environ, "ROLLOUTMQ_VLLM_SERVER": str(server)}
    print(levels, subprocess.run(command, env=environ, stdout=subprocess.DEVNULL).returncode, flush=True)
"""


def test_a_worker_ends_with_its_engine_and_an_engine_with_its_server(extension: Any) -> None:
    """As child or grandchild of the server they live; as an orphan they would be left behind."""
    source = "\n".join(inspect.getsource(one) for one in (extension.end_with_parent, extension._parent))
    source = f"SERVER, _PR_SET_PDEATHSIG = {extension.SERVER!r}, 1\n{source}"
    with child(PARENT, source) as server:
        assert server.line() == "1 0"
        assert server.line() == "2 0"
        assert server.line() == "3 247"


def test_nothing_is_sent_to_a_vllm_that_shares(lent: Lent, extension: Any) -> None:
    transfer = importlib.import_module(f"{OURS}.weight_transfer").FileTransfer()
    transfer.start_weight_update()
    manifest = msgspec.json.encode(lent.share.manifest()).decode()
    assert extension.SharedWeights.match_weights(lent.worker, manifest) == {}
    lent.attach(extension.core())
    assert "shared" in extension.SharedWeights.match_weights(lent.worker, manifest)["problem"]
    with pytest.raises(WeightsMismatchError, match="shared with a trainer"):
        transfer.start_weight_update()
