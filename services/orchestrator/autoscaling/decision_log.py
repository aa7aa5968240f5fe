"""`decisions.jsonl`: every decision with all of its inputs, so that `simulate --replay` can recompute it.

A line is a header or a decision of one environment. A header has the bounds, the scaling configuration and the whole
state; the decisions after it need nothing else. A full file replaces the previous one, and the next starts with
headers: a run leaves at most two files of `FILE_BYTES`.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.files import open_regular, private_file
from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.autoscaling.control_law import ControllerState, PressureController
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, PressureSample

logger = logging.getLogger(__name__)

FILE_BYTES: Final = 32 << 20
"""About a day of one environment at one decision a second."""


@dataclass(frozen=True, slots=True)
class DecisionLogHeader:
    """State from which the decisions that follow can be recomputed."""

    env: str
    min_workers: int
    max_workers: int
    scaling: dict[str, Any]
    state: ControllerState


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One decision. `at` is wall-clock time, `now` the controller's clock; both in seconds."""

    env: str
    at: float
    now: float
    sample: PressureSample
    decision: Decision


Entry = DecisionLogHeader | LoggedDecision


class DecisionLog:
    """Appends entries; belongs to one process. A full disk costs lines, never a decision."""

    def __init__(self, path: Path, limit_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._nbytes: int | None = None

    @property
    def begins(self) -> bool:
        """Return whether headers are due: at the first write, after a failed write, and when the file is full."""
        return self._nbytes is None or self._nbytes >= self._limit_bytes

    def begin(self, beginnings: list[DecisionLogHeader]) -> None:
        """Rotate a full file, and write the headers."""
        try:
            if self._path.exists() and self._path.stat().st_size >= self._limit_bytes:
                self._path.replace(previous_file(self._path))
            self._nbytes = self._path.stat().st_size if self._path.exists() else 0
        except OSError as error:
            logger.error("decisions not logged path=%s error=%s", self._path, error)
            return
        # The last line may be torn. The newline ends it, and a reader resumes at the headers.
        self._append([{"begin": asdict(one)} for one in beginnings], b"\n" if self._nbytes else b"")

    def add(self, made: LoggedDecision) -> None:
        """Append a decision."""
        if self._nbytes is not None:
            self._append([{"made": asdict(made)}])

    def _append(self, lines: list[dict[str, Any]], before: bytes = b"") -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        data = before + text.encode()
        try:
            with private_file(self._path, "ab", buffering=0) as file:
                written = file.write(data)
        except OSError as error:
            logger.error("decisions not logged path=%s error=%s", self._path, error)
            written = 0
        whole = self._nbytes is not None and written == len(data)
        self._nbytes = (self._nbytes or 0) + len(data) if whole else None


def previous_file(path: Path) -> Path:
    """Return the path of the previous, full file."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a file; torn lines, at its end or before a header, are skipped.

    Raises:
        ValueError: A line is not an entry; the error has its number.
    """
    broken: ValueError | None = None
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            if not line.strip():
                continue
            try:
                entry = _entry(json.loads(line))
            except (ValueError, TypeError, RecursionError, msgspec.ValidationError) as error:
                broken = broken or ValueError(f"{path}:{number}: {error}")
                continue
            if broken is not None and not isinstance(entry, DecisionLogHeader):
                break
            broken = None
            yield entry
    if broken is not None:
        raise broken


def _entry(line: Any) -> Entry:
    match line:
        case {"begin": fields}:
            return msgspec.convert(fields, DecisionLogHeader)
        case {"made": fields}:
            return msgspec.convert(fields, LoggedDecision)
        case _:
            raise ValueError("neither a header nor a decision")


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that differs when recomputed."""

    recorded: LoggedDecision
    now: Decision


@dataclass(slots=True)
class Replay:
    """Result of recomputing decisions."""

    decisions: int = 0
    """Recomputed decisions."""
    differences: int = 0
    """Recomputed decisions that differ from the record by more than the wording of the reason."""
    first: Difference | None = None
    orphans: int = 0
    """Decisions without a header before them."""


def replay(entries: Iterator[Entry]) -> Replay:
    """Recompute all recorded decisions.

    Raises:
        ValueError: The scaling configuration in a header is invalid.
    """
    laws: dict[str, tuple[PressureController, ControllerState]] = {}
    out = Replay()
    for entry in entries:
        if isinstance(entry, DecisionLogHeader):
            scaling = ScalingConfig.model_validate(entry.scaling)
            law = PressureController(entry.min_workers, entry.max_workers, scaling)
            laws[entry.env] = law, entry.state
        elif entry.env in laws:
            law, state = laws[entry.env]
            state, decision = law.decide(state, entry.sample, entry.now)
            laws[entry.env] = law, state
            out.decisions += 1
            if replace(decision, reason="") != replace(
                entry.decision, reason=""
            ):  # the wording is free to change
                out.differences += 1
                out.first = out.first or Difference(entry, decision)
        else:
            out.orphans += 1
    return out
