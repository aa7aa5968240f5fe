"""Start of one process of a run: `python -P -m rolloutmq.launch.service_process NAME --run-dir DIR [OPTION VALUE]`.

The launcher and the orchestrator start processes this way. The module does without the library of the command line:
its import takes 37 of the 560 ms of CPU until a broker is ready. `rolloutmq NAME` does the same with help and checks.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.lifecycle import gc_paused
from rolloutmq.launch.endings import guarded
from rolloutmq.schemas.process import python_command

PARENT: Final = "ROLLOUTMQ_PARENT"
"""As in `services.process.ending`, which few processes need this early."""


def broker(run_dir: Path) -> int:
    """Run the broker; return its exit code, as all functions here do."""
    with gc_paused():
        from rolloutmq.services.broker.server import main
    return main(run_dir)


def orchestrator(run_dir: Path) -> int:
    """Run the orchestrator."""
    with gc_paused():
        from rolloutmq.services.orchestrator.server import main
    return main(run_dir)


def cluster(run_dir: Path) -> int:
    """Run the cluster service: the workers of the run on other hosts."""
    with gc_paused():
        from rolloutmq.services.orchestrator.cluster.service import main
    return main(run_dir)


def telemetry(run_dir: Path) -> int:
    """Run telemetry: sample the machine and record bus events."""
    with gc_paused():
        from rolloutmq.services.telemetry.server import main
    return main(run_dir)


def inference(run_dir: Path, engine: str = "inference") -> int:
    """Run the inference server of that name."""
    from rolloutmq.bus.rundir import load_run

    with gc_paused():
        if load_run(run_dir)[0].inference.kind == "vllm":
            from rolloutmq.services.inference.vllm.server import main
        else:
            from rolloutmq.services.inference.tiny.server import main
    return main(run_dir, engine)


def teacher(run_dir: Path) -> int:
    """Run the teacher of a distillation run."""
    with gc_paused():
        from rolloutmq.services.inference.teacher.server import main
    return main(run_dir)


def curriculum(run_dir: Path) -> int:
    """Run the curriculum: choose the tasks of each environment with a section `curriculum.NAME`."""
    with gc_paused():
        from rolloutmq.services.curriculum.server import main
    return main(run_dir)


def worker(run_dir: Path, worker: str) -> int:
    """Run the environment worker of that name."""
    with gc_paused():
        from rolloutmq.services.worker.runtime import main
    return main(run_dir, worker)


def gateway(run_dir: Path) -> int:
    """Run the HTTP gateway of a run."""
    with gc_paused():
        from rolloutmq.services.gateway.server import main
    return main(run_dir)


def dashboard(run_dir: Path) -> int:
    """Run the server of the page, on the socket of a launcher."""
    with gc_paused():
        from rolloutmq.services.dashboard.server import main
    return main(run_dir)


def trainer(run_dir: Path, rank: int | str = 0) -> int:
    """Run one rank of the trainer, from 0 to `trainer.ranks` - 1."""
    with gc_paused():
        from rolloutmq.trainer.loop import main
    return main(run_dir, int(rank))


def relay(run_dir: Path, source: Path | str | None = None, listen: str = "", behind: str = "") -> int:
    """Run the relay of the weights."""
    with gc_paused():
        from rolloutmq.trainer.weights.stream.relay import main
    return main(run_dir, Path(source) if source else None, listen, behind)


STARTS: Final[dict[str, Callable[..., int]]] = {
    "broker": broker,
    "orchestrator": orchestrator,
    "cluster": cluster,
    "telemetry": telemetry,
    "inference": inference,
    "teacher": teacher,
    "curriculum": curriculum,
    "worker": worker,
    "serve-gateway": gateway,
    "serve-dashboard": dashboard,
    "trainer": trainer,
    "relay": relay,
}


OPTIONS: Final = {
    "inference": {"engine"},
    "worker": {"worker"},
    "trainer": {"rank"},
    "relay": {"source", "listen", "behind"},
}
"""Options beside the run directory."""


def main() -> None:
    """Run the process that the command line names, and exit with its code."""
    name, *rest = sys.argv[1:] or [""]
    words = [word.removeprefix("--").replace("-", "_") for word in rest[::2]]
    options = dict(zip(words, rest[1::2], strict=False))
    if not _fits(name, rest, options):
        # The command line says what is wrong.
        os.execv(sys.executable, python_command(sys.executable, "rolloutmq.launch.cli", *sys.argv[1:]))
    run_dir = Path(options.pop("run_dir"))
    if PARENT in os.environ:
        from rolloutmq.services.process.ending import die_with_parent

        die_with_parent()
    try:
        guarded(lambda: STARTS[name](run_dir, **options))
    except SystemExit as end:
        from rolloutmq.services.process.ending import note_end  # loaded by the service anyway

        note_end(end.code if isinstance(end.code, int) else int(bool(end.code)))
        raise


def _fits(name: str, words: Sequence[str], options: Mapping[str, str]) -> bool:
    """Return whether these are arguments that the launcher gives."""
    known = {"run_dir"} | OPTIONS.get(name, set())
    needed = {"run_dir", "worker"} if name == "worker" else {"run_dir"}
    return (
        name in STARTS
        and len(words) == 2 * len(options)
        and needed <= options.keys() <= known
        and options.get("rank", "0").isdecimal()
    )


if __name__ == "__main__":
    main()
