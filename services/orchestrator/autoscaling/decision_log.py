"""`decisions.jsonl`: every decision with all of its inputs, so that `simulate --replay` can recompute it.

A line is a header or a decision of one environment. A header has the bounds, the scaling configuration and the whole
state; the decisions after it need nothing else. A full file replaces the previous one, and the next starts with
headers: a run leaves at most two files of `FILE_BYTES`.

A restarted orchestrator continues from here as well, see `resume`: measuring anew takes several steps of the trainer.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from rolloutmq.bus.files import open_regular, private_file
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.autoscaling.control_law import ControllerState, PressureController
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, PressureSample, ServerLimit

logger = logging.getLogger(__name__)

FILE_BYTES: Final = 32 << 20
"""About half a day of one environment at one decision a second: 0.8 kB each, with its part of the headers."""
HEADERS_EVERY: Final = 100
"""Decisions of each environment between two headers."""
TAIL_BYTES: Final = 192 << 10
"""End of the file that `resume` reads, for each environment: more than twice what lies between two headers."""
RESUME_S: Final = 120.0
"""Longest absence after which the measurements still hold."""
CLOCKS_S: Final = 5.0
"""Tolerance between the clocks: after a reboot the monotonic clock tells another absence than the wall clock."""


class DecisionLogHeader(msgspec.Struct, frozen=True):
    """State from which the decisions that follow can be recomputed."""

    env: str
    min_workers: int
    max_workers: int
    scaling: dict[str, Any]
    state: ControllerState

    def controller(self) -> PressureController:
        """Return the controller that decided.

        Raises:
            ValueError: The scaling configuration is invalid.
        """
        return PressureController(
            self.min_workers, self.max_workers, ScalingConfig.model_validate(self.scaling)
        )


class LoggedDecision(msgspec.Struct, frozen=True):
    """One decision. `at` is wall-clock time, `now` the controller's clock; both in seconds."""

    env: str
    at: float
    now: float
    sample: PressureSample
    decision: Decision


Entry = DecisionLogHeader | LoggedDecision
BROKEN: Final = ValueError, TypeError, RecursionError, msgspec.ValidationError
"""What a line raises that is not an entry."""


class DecisionLog:
    """Appends entries; belongs to one process. A full disk costs lines, never a decision."""

    def __init__(self, path: Path, limit_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._nbytes: int | None = None
        self._left = 0
        self._failures = LogThrottle()

    @property
    def begins(self) -> bool:
        """Return whether headers are due: first, after a failed write, from time to time, and when the file is full."""
        return self._nbytes is None or self._left <= 0 or self._nbytes >= self._limit_bytes

    def begin(self, beginnings: list[DecisionLogHeader]) -> None:
        """Rotate a full file, and write the headers."""
        try:
            if self._path.exists() and self._path.stat().st_size >= self._limit_bytes:
                self._path.replace(previous_file(self._path))
            self._nbytes = self._path.stat().st_size if self._path.exists() else 0
        except OSError as error:
            self._report(error)
            return
        self._left = HEADERS_EVERY * len(beginnings)
        # The last line may be torn. The newline ends it, and a reader resumes at the headers.
        self._append(
            [{"begin": msgspec.to_builtins(one)} for one in beginnings], b"\n" if self._nbytes else b""
        )

    def add(self, made: LoggedDecision) -> None:
        """Append a decision."""
        if self._nbytes is not None:
            self._left -= 1
            self._append([{"made": msgspec.to_builtins(made)}])

    def _append(self, lines: list[dict[str, Any]], before: bytes = b"") -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        data = before + text.encode()
        try:
            with private_file(self._path, "ab", buffering=0) as file:
                written = file.write(data)
        except OSError as error:
            self._report(error)
            written = 0
        whole = self._nbytes is not None and written == len(data)
        self._nbytes = (self._nbytes or 0) + len(data) if whole else None

    def _report(self, error: OSError) -> None:
        """Log a failure, the same one at intervals: a decision follows every second."""
        if self._failures.is_due(str(error), time.monotonic()):
            logger.error("decisions not logged path=%s error=%s", self._path, error)


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
            except BROKEN as error:
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


class Resumed(msgspec.Struct):
    """The last state of a controller, and the header it follows from."""

    header: DecisionLogHeader
    state: ControllerState
    at: float = -math.inf
    now: float = -math.inf
    """Times of its last decision, as those of `LoggedDecision`."""
    server: ServerLimit = msgspec.field(default_factory=ServerLimit)
    engines: int = 0
    """What the inference servers allowed then, and their number."""


def resume(path: Path, environments: int, now: float, at: float) -> dict[str, Resumed]:
    """Return the states that an orchestrator left, by environment; none if it left them long ago or before a reboot.

    It recomputes the decisions after the last headers. An environment without a whole record is left out. Blocks; reads
    at most `TAIL_BYTES` for each environment.

    Args:
        path: The file; it may be absent.
        environments: Number of environments.
        now: Seconds, monotonic.
        at: Seconds, wall clock.
    """
    found: dict[str, Resumed] = {}
    laws: dict[str, PressureController] = {}
    try:
        lines = _tail(path, environments * TAIL_BYTES)
    except OSError as error:
        logger.warning("measures anew, the decisions cannot be read path=%s error=%s", path, error)
        return {}
    for line in lines:
        try:
            entry = _entry(json.loads(line))
            if isinstance(entry, DecisionLogHeader):
                found[entry.env], laws[entry.env] = Resumed(entry, entry.state), entry.controller()
            elif entry.env in found:
                last = found[entry.env]
                last.state, _ = laws[entry.env].decide(last.state, entry.sample, entry.now)
                last.at, last.now = entry.at, entry.now
                last.server, last.engines = entry.sample.server, entry.sample.engines
        except BROKEN:
            found.clear()  # a kill tore the line; headers follow
    return {env: one for env, one in found.items() if _is_recent(one, now, at)}


def _is_recent(last: Resumed, now: float, at: float) -> bool:
    away_s = now - last.now
    return 0.0 <= away_s <= RESUME_S and abs(at - last.at - away_s) <= CLOCKS_S


def _tail(path: Path, nbytes: int) -> list[bytes]:
    """Return the whole lines at the end of a file."""
    if not path.exists():
        return []
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - nbytes)
        file.seek(start)
        lines = file.read(nbytes).split(b"\n")[:-1]
    return [line for line in lines[1 if start else 0 :] if line]


class Difference(msgspec.Struct, frozen=True):
    """A decision that differs when recomputed."""

    recorded: LoggedDecision
    now: Decision


class Replay(msgspec.Struct):
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
            laws[entry.env] = entry.controller(), entry.state
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
