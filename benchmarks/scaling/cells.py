"""Measured cells: the bounds of one environment in one scenario, over the seeds, in `results.json`.

A cell names the law that it was measured with: a hash of the code of the autoscaler and of the simulation. If either of
them changes, the cell counts as not measured.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal

import msgspec

from benchmarks.harness.figure import Figure
from rolloutmq.schemas.config import orchestrator as settings
from rolloutmq.services.orchestrator import autoscaling, simulation
from rolloutmq.services.orchestrator.autoscaling import servers
from rolloutmq.services.orchestrator.engines import scaling
from rolloutmq.services.orchestrator.simulation.scenarios import STARTS_S, all_scenarios
from rolloutmq.services.orchestrator.simulation.site import Scenario
from rolloutmq.services.orchestrator.simulation.verdict import Bound, Verdict

SEEDS: Final = 20
"""Seeds of which the bounds are promised."""
RESULTS: Final = Path(__file__).with_name("results.json")
SOURCES: Final = (autoscaling, servers, simulation, scaling, settings)
"""Packages and modules that decide the figures."""
DIGITS: Final = 5
EXACT: Final = "engines"
"""A bound that nothing keeps with a margin."""
Key = tuple[float, str, str]
"""Start of a worker in seconds, scenario, and environment."""


class CellBound(msgspec.Struct, frozen=True, array_like=True):
    """A bound and its figure over the seeds; see `Bound` of the simulation."""

    median: float
    worst: float
    limit: float
    worst_limit: float
    kind: Literal["most", "least"]

    @classmethod
    def of(cls, bound: Bound) -> "CellBound":
        """Return the bound with rounded numbers."""
        return cls(
            _rounded(bound.median),
            _rounded(bound.worst),
            _rounded(bound.limit),
            _rounded(bound.worst_limit),
            "least" if bound.is_least else "most",
        )

    @property
    def part(self) -> float:
        """Return how much of the bound is used; above 1, it is exceeded."""
        pairs = (self.median, self.limit), (self.worst, self.worst_limit)
        if self.kind == "least":
            pairs = (self.limit, self.median), (self.worst_limit, self.worst)
        return max(_part(of, whole) for of, whole in pairs)

    def __str__(self) -> str:
        return f"{self.median:g}/{self.worst:g}, at {self.kind} {self.limit:g}/{self.worst_limit:g}"


class Cell(msgspec.Struct, frozen=True):
    """One environment of a scenario, with workers that start so fast.

    Attributes:
        law: Hash of the law and of the simulation.
        broken: Names of the exceeded bounds.
        bounds: All bounds by name: median and worst of the seeds, and the limits of both.
    """

    start_s: float
    scenario: str
    env: str
    seeds: int
    law: str
    broken: tuple[str, ...]
    bounds: dict[str, CellBound]

    @classmethod
    def of(cls, verdict: Verdict) -> "Cell":
        """Return the cell of a verdict on the present law."""
        bounds = {one.name: CellBound.of(one) for one in verdict.bounds}
        return cls(
            verdict.start_s, verdict.scenario, verdict.env, verdict.seeds, law(), verdict.broken, bounds
        )

    @property
    def key(self) -> Key:
        """Return the identity: a later measurement replaces the earlier one."""
        return self.start_s, self.scenario, self.env

    @property
    def told(self) -> tuple[str, ...]:
        """Return the names of the exceeded bounds, or else of the one of which most is used."""
        others = [name for name in self.bounds if name != EXACT]
        return self.broken or (max(others, key=lambda name: self.bounds[name].part),)


def keys(scenario: Scenario) -> list[Key]:
    """Return the keys of the cells of a scenario."""
    return [(scenario.start_s, scenario.name, env) for env in scenario.site.environments]


def is_measured(found: Mapping[Key, Cell], key: Key, seeds: int) -> bool:
    """Return whether the present law was measured with so many seeds."""
    return key in found and found[key].law == law() and found[key].seeds >= seeds


def load(path: Path = RESULTS) -> dict[Key, Cell]:
    """Return the measured cells; none without a file."""
    if not path.exists():
        return {}
    return {one.key: one for one in msgspec.json.decode(path.read_bytes(), type=list[Cell])}


def save(cells: Iterable[Cell], path: Path = RESULTS) -> None:
    """Write the cells of present scenarios, a line for each, in their order."""
    by_key = {one.key: one for one in cells}
    lines = [json.dumps(msgspec.to_builtins(by_key[key])) for key in all_keys() if key in by_key]
    new = path.with_name(f"{path.name}.new")
    new.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    new.replace(path)


def promised(path: Path = RESULTS) -> Iterator[Figure]:
    """Report each cell as last measured. One that this law has not is unmet."""
    found = load(path)
    for key in all_keys():
        start_s, scenario, env = key
        where, name = f"simulated {start_s:g} s", f"{scenario} ({env})"
        if is_measured(found, key, SEEDS):
            cell = found[key]
            said = "; ".join(f"{one} {cell.bounds[one]}" for one in cell.told)
            yield Figure(where, name, f"{cell.bounds[cell.told[0]].part:.2f}", said, not cell.broken)
        else:
            said = f"{SEEDS} seeds with this law; run `make bench-scaling`"
            yield Figure(where, name, "not measured", said, met=False)


@cache
def law() -> str:
    """Return the hash of the code that decides the figures; comments and docstrings do not count."""
    found = hashlib.sha256()
    for module in SOURCES:
        path = Path(str(module.__file__))
        for source in sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]:
            found.update(source.name.encode() + _code(source.read_text()).encode())
    return found.hexdigest()[:12]


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def all_keys() -> list[Key]:
    """Return the keys of all cells, by start and scenario."""
    return [key for start_s in STARTS_S for one in all_scenarios(start_s) for key in keys(one)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _part(of: float, whole: float) -> float:
    if whole:
        return of / whole
    return float("inf") if of > 0.0 else 0.0
