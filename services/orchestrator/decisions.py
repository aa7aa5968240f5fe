"""`decisions.jsonl`: every decision with all that it was made of, so that the law gives it again: `simulate --replay`.

A line is a beginning or a decision, of one environment. A beginning has the bounds, the numbers of the law and its
whole state; what follows needs nothing else. When the file is full it takes the place of the one before, and the next
begins with beginnings: two files of `FILE_BYTES` are all that a run leaves.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.schemas.orchestration import ScalingConfig
from rolloutmq.services.orchestrator.controller import PressureController, State
from rolloutmq.services.orchestrator.pressure import Decision, PressureSample

logger = logging.getLogger(__name__)

FILE_BYTES: Final = 32 << 20
"""Most of a day of one environment at a decision a second."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """From here on the law of an environment goes on by itself."""

    env: str
    min_workers: int
    max_workers: int
    scaling: dict[str, Any]
    state: State


@dataclass(frozen=True, slots=True)
class Made:
    """One decision. `at` is wall-clock time, `now` the clock of the law; both in seconds."""

    env: str
    at: float
    now: float
    sample: PressureSample
    decision: Decision


Entry = Beginning | Made


class DecisionLog:
    """Appends entries; belongs to one process. A disk that is full costs lines, never a decision."""

    def __init__(self, path: Path, limit_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._nbytes: int | None = None

    @property
    def begins(self) -> bool:
        """Whether beginnings are due: nothing was written in this life, a write failed, or the file is full."""
        return self._nbytes is None or self._nbytes >= self._limit_bytes

    def begin(self, beginnings: list[Beginning]) -> None:
        """Go on in a new file if this one is full, and write the beginnings."""
        try:
            if self._path.exists() and self._path.stat().st_size >= self._limit_bytes:
                self._path.replace(former(self._path))
            self._nbytes = self._path.stat().st_size if self._path.exists() else 0
        except OSError as error:
            logger.error("decisions not logged path=%s error=%s", self._path, error)
            return
        # What was before may have been torn: it ends here, and a reader goes on with the beginnings.
        self._append([{"begin": asdict(one)} for one in beginnings], b"\n" if self._nbytes else b"")

    def add(self, made: Made) -> None:
        """Append a decision."""
        if self._nbytes is not None:
            self._append([{"made": asdict(made)}])

    def _append(self, lines: list[dict[str, Any]], before: bytes = b"") -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        data = before + text.encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                written = file.write(data)
        except OSError as error:
            logger.error("decisions not logged path=%s error=%s", self._path, error)
            written = 0
        whole = self._nbytes is not None and written == len(data)
        self._nbytes = (self._nbytes or 0) + len(data) if whole else None


def former(path: Path) -> Path:
    """Return where a full file goes."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a file; torn lines, at its end or before a beginning, are left out.

    Raises:
        ValueError: With the number of the line that is no entry.
    """
    broken: ValueError | None = None
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            if not line.strip():
                continue
            try:
                entry = _entry(json.loads(line))
            except (ValueError, TypeError, msgspec.ValidationError) as error:
                broken = broken or ValueError(f"{path}:{number}: {error}")
                continue
            if broken is not None and not isinstance(entry, Beginning):
                break
            broken = None
            yield entry
    if broken is not None:
        raise broken


def _entry(line: Any) -> Entry:
    match line:
        case {"begin": fields}:
            return msgspec.convert(fields, Beginning)
        case {"made": fields}:
            return msgspec.convert(fields, Made)
        case _:
            raise ValueError("neither a beginning nor a decision")


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that the law makes otherwise now."""

    recorded: Made
    now: Decision


@dataclass(slots=True)
class Replay:
    """What came of deciding again."""

    decisions: int = 0
    """How many were made again."""
    differences: int = 0
    """How many of those came out otherwise."""
    first: Difference | None = None
    orphans: int = 0
    """How many had no beginning before them."""


def replay(entries: Iterator[Entry]) -> Replay:
    """Decide again all that was decided.

    Raises:
        ValueError: The numbers of the law in a beginning are not valid.
    """
    laws: dict[str, tuple[PressureController, State]] = {}
    out = Replay()
    for entry in entries:
        if isinstance(entry, Beginning):
            scaling = ScalingConfig.model_validate(entry.scaling)
            law = PressureController(entry.min_workers, entry.max_workers, scaling)
            laws[entry.env] = law, entry.state
        elif entry.env in laws:
            law, state = laws[entry.env]
            state, decision = law.decide(state, entry.sample, entry.now)
            laws[entry.env] = law, state
            out.decisions += 1
            if decision != entry.decision:
                out.differences += 1
                out.first = out.first or Difference(entry, decision)
        else:
            out.orphans += 1
    return out
