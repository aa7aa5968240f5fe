"""`rolloutmq doctor` and `rolloutmq check`: check this machine, or a configuration, with a remedy for each finding.

Each check is a function that returns a `Finding` and changes nothing. A finding with `needed=False` is advice: a run
works without it. With a configuration also its environments are tried, in a process of their own.
"""

import asyncio
import importlib.util
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Final

from rolloutmq.launch.endings import EXIT_CONFIG, EXIT_FAILED, UserCodeError, problems_of
from rolloutmq.schemas.errors import ConfigError, MissingError, RolloutMQError, install_remedy
from rolloutmq.schemas.printable import printable

MIN_PYTHON: Final = (3, 11)
MIN_DESCRIPTORS: Final = 4096
"""About 1,000 producers with three sockets each."""
MIN_SHM_BYTES: Final = 64 << 20
MIN_DISK_BYTES: Final = 1 << 30
DRIVER_TIMEOUT_S: Final = 10.0
"""Longest wait for the GPU driver: the first call starts each GPU, for a second or more."""
IPC_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        what: Subject of the check.
        fine: Whether the check passed.
        found: Observed value.
        remedy: How to fix a failed check; empty if it passed.
        needed: Whether a run requires it.
        verdict: First word of its line; by default `ok`, `MISSING` or `advice`.
        code: Exit code if it failed and is required.
        report: Lines about an exception in the user's code.
    """

    what: str
    fine: bool
    found: str
    remedy: str = ""
    needed: bool = True
    verdict: str = ""
    code: int = EXIT_FAILED
    report: str = ""

    @property
    def word(self) -> str:
        """First word of its line."""
        return self.verdict or ("ok" if self.fine else "MISSING" if self.needed else "advice")


def python_version(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Check the Python version."""
    found = ".".join(map(str, version))
    remedy = "install Python 3.11 or newer and recreate the virtual environment"
    return Finding("python", version >= MIN_PYTHON, found, remedy)


def module(name: str, extra: str, what: str, *, needed: bool = False) -> Finding:
    """Check that a package of one of our extras is installed, without importing it."""
    try:
        there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is missing
        there = False
    remedy = install_remedy(extra) if extra else "run pip install rolloutmq"
    return Finding(what, there, "installed" if there else "not installed", remedy, needed)


def descriptors() -> Finding:
    """Check the hard limit of open files; the broker raises its soft limit to it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = hard == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{hard} at most"
    remedy = f"raise the hard limit to {MIN_DESCRIPTORS} (ulimit -Hn), or run fewer workers"
    return Finding("open files", unlimited or hard >= MIN_DESCRIPTORS, found, remedy, needed=False)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Check the tmpfs that holds the shared weights."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding("shared memory", fine=False, found="none", remedy=f"mount a tmpfs at {path}")
    free = shutil.disk_usage(path).free
    remedy = "enlarge it, in a container for example with --shm-size=8g"
    return Finding("shared memory", free >= MIN_SHM_BYTES, f"{_size(free)} free", remedy)


def disk(path: Path = Path()) -> Finding:
    """Check the space for logs, checkpoints and journal."""
    free = shutil.disk_usage(path).free
    return Finding("disk", free >= MIN_DISK_BYTES, f"{_size(free)} free", "free at least 1 GiB")


def socket_paths() -> Finding:
    """Check the temporary directory, which holds the sockets of run directories with long paths."""
    base = tempfile.gettempdir()
    fine = len(base.encode()) < IPC_PATH_BYTES // 2 and os.access(base, os.W_OK)
    return Finding("socket paths", fine, base, "set TMPDIR to a short, writable directory")


def cores() -> Finding:
    """Check the number of CPU cores this process may use."""
    count = len(os.sched_getaffinity(0))
    return Finding("cores", count >= 2, str(count), "use at least two cores", needed=False)


def gpus(timeout_s: float = DRIVER_TIMEOUT_S) -> Finding:
    """Check for GPUs with NVML, each for itself; a run without one trains on the CPU.

    Args:
        timeout_s: Time-out of each call to the driver, which may hang.
    """
    from rolloutmq.schemas.wire.telemetry import GpuAbsence, GpuState
    from rolloutmq.services.telemetry.gpus import GpuProbe
    from rolloutmq.services.telemetry.nvml import Nvml

    driver = Nvml("")
    samples = asyncio.run(GpuProbe(driver, "", timeout_s).sample(1, time.time()))
    driver.close()
    if isinstance(samples, GpuAbsence):
        remedy = (
            "install the NVIDIA driver if this machine has a GPU, and reboot if it was updated; "
            "without a GPU the run uses the CPU"
        )
        return Finding("gpu", fine=False, found=f"none ({samples.why})", remedy=remedy, needed=False)
    wrong = [f"{one.uuid}: {one.why}" for one in samples if one.state is not GpuState.OK]
    wrong += [f"index {index}: {why}" for index, why in driver.unreached.items()]
    count = len(samples) + len(driver.unreached)
    if wrong:
        found = f"{count - len(wrong)} of {count} ({', '.join(wrong)})"
        return Finding("gpu", fine=False, found=found, remedy="see nvidia-smi and dmesg", needed=False)
    return Finding("gpu", fine=True, found=f"{count}")


CHECKS: Final[Iterable[Callable[[], Finding]]] = (
    python_version,
    lambda: module("zmq", "", "pyzmq", needed=True),
    lambda: module("msgspec", "", "msgspec", needed=True),
    lambda: module("torch", "trainer", "torch (trainer and tiny inference)"),
    lambda: module("transformers", "trainer", "transformers (trainer and tiny inference)"),
    lambda: module("matplotlib", "report", "matplotlib (report.png)"),
    lambda: module("wandb", "wandb", "wandb (telemetry.sinks)"),
    lambda: module("tensorboard", "tensorboard", "tensorboard (telemetry.sinks)"),
    lambda: module("mlflow", "mlflow", "mlflow (telemetry.sinks)"),
    lambda: module("opentelemetry.sdk", "otel", "opentelemetry (telemetry.trace_ratio)"),
    cores,
    shared_memory,
    disk,
    socket_paths,
    descriptors,
    gpus,
)


def configuration(
    file: Path,
    *,
    assignments: Iterable[str] = (),
    timeout_s: float | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> list[Finding]:
    """Check a configuration with all checks of `rolloutmq up FILE`: keys, environments, addresses, teacher.

    Each error, failure and piece of advice is one finding.

    Args:
        file: The configuration.
        assignments: Texts `key=value` that override it.
        timeout_s: Time-out of the trial of each environment, in seconds; None for that of `up`.
        tell: Told what takes long, in one line.
    """
    from rolloutmq.launch.preflight import checks
    from rolloutmq.launch.preflight.trial import TIMEOUT_S

    try:
        config = checks.loaded(file, environ=os.environ, assignments=assignments, tell=tell)
        found = checks.examine(config, timeout_s=timeout_s or TIMEOUT_S, tell=tell)
    except RolloutMQError as error:
        found = checks.Examined(problems_of(error))
    fine = [] if found.problems else [Finding("configuration", fine=True, found=str(file))]
    return [
        *fine,
        *(_wrong(file, problem) for problem in found.problems),
        *(_failed(failure) for failure in found.failures),
        *(
            Finding(f"environment {name}", fine=True, found=what or "loaded")
            for name, what in found.tried.items()
        ),
        *(_advised(each) for each in found.advice),
    ]


def _wrong(file: Path, problem: RolloutMQError) -> Finding:
    if isinstance(problem, ConfigError):
        report = problem.report if isinstance(problem, UserCodeError) else ""
        what, found = problem.path, problem.problem
        return Finding(what, fine=False, found=found, verdict="WRONG", code=EXIT_CONFIG, report=report)
    verdict = "" if isinstance(problem, MissingError) else "FAILED"
    return Finding("configuration", fine=False, found=str(file), remedy=str(problem), verdict=verdict)


def _failed(failure: UserCodeError) -> Finding:
    return Finding(
        failure.path, fine=False, found=failure.problem, verdict="FAILED", needed=True, report=failure.report
    )


def _advised(advice: UserCodeError) -> Finding:
    return Finding(advice.path, fine=False, found=advice.problem, needed=False, report=advice.report)


def check(file: Path, *, assignments: Iterable[str], timeout_s: float, as_json: bool) -> int:
    """Check a configuration as `up` does, and print the findings.

    Returns 0 if all is fine, 2 if `up` would refuse it, else 1: code of an environment raised or took too long, or this
    machine lacks something.
    """
    findings = configuration(file, assignments=assignments, timeout_s=timeout_s, tell=_tell)
    return print_findings(findings, as_json=as_json)


def examine(checks: Iterable[Callable[[], Finding]] = CHECKS) -> list[Finding]:
    """Run all checks."""
    return [check() for check in checks]


def report(*, as_json: bool, file: Path | None = None) -> int:
    """Print the findings for this machine and a configuration; return 0 if a run can start here.

    Otherwise 2 for a wrong configuration, else 1.
    """
    more = [] if file is None else configuration(file, tell=_tell)
    return print_findings([*examine(), *more], as_json=as_json)


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print findings; return the highest exit code of a required check that failed, else 0."""
    if as_json:
        text = json.dumps([asdict(finding) | {"verdict": finding.word} for finding in findings], indent=2)
    else:
        text = "\n".join(_lines(finding) for finding in findings)
    sys.stdout.write(text + "\n")
    return max((finding.code for finding in findings if finding.needed and not finding.fine), default=0)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _lines(finding: Finding) -> str:
    text = f"{finding.word:<7} {finding.what}: {finding.found}"
    if not finding.fine and finding.remedy:
        text = f"{text}; {finding.remedy}"
    report = f"\n\n{indent(finding.report, ' ' * 8)}\n" if finding.report else ""
    return printable(text) + report


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
