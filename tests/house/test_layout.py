"""The layout of the packages: how large they are, and who imports whom."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "bus", "trainer", "services", "launch", "testing")
TREES = (*PACKAGES, "benchmarks", "examples", "tests")
ENTRIES_LIMIT = 15
LINES_LIMIT = 700
FLOORS_LIMIT = 10

Graph = dict[str, set[str]]


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module, by its name below `rolloutmq`."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the modules of ours that a module names in its imports, wherever in the file they stand."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rolloutmq."):
            parent = str(node.module).removeprefix("rolloutmq.")
            found |= {
                name if (name := f"{parent}.{each.name}") in modules() else parent for each in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {each.name.removeprefix("rolloutmq.") for each in node.names}
    return frozenset((found & modules().keys()) - {module})


def rooms(package: str) -> Graph:
    """Return the imports between the direct children of a package, folders and files alike."""
    prefix = f"{package}." if package else ""

    def room(module: str) -> str:
        return module.removeprefix(prefix).split(".")[0]

    graph: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules():
        if module.startswith(prefix) and module != package:
            inside = {room(name) for name in imports_of(module) if name.startswith(prefix)}
            graph[room(module)] |= inside - {room(module)}
    return dict(graph)


def floors(graph: Graph) -> int:
    """Return the longest chain of imports; fail on a cycle."""
    left, height = {name: set(others) for name, others in graph.items()}, 0
    while left:
        ground = {name for name, others in left.items() if not others & left.keys()}
        assert ground, f"these import each other: {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in ground}
        height += 1
    return height


def folders() -> list[Path]:
    found = [
        folder for tree in TREES for folder in (ROOT / tree, *(ROOT / tree).rglob("*")) if folder.is_dir()
    ]
    return [folder for folder in found if "__pycache__" not in folder.parts]


def packages() -> list[str]:
    return ["", *sorted(name for name, path in modules().items() if path.name == "__init__.py")]


def test_no_folder_has_more_entries_than_fit_a_glance() -> None:
    crowded = {}
    for folder in folders():
        entries = [path.name for path in folder.iterdir() if path.name != "__pycache__"]
        if len(entries) > ENTRIES_LIMIT:
            crowded[str(folder.relative_to(ROOT))] = len(entries)
    assert not crowded


def test_a_file_is_one_concept() -> None:
    long = {
        name: lines
        for name, path in modules().items()
        if (lines := path.read_text().count("\n")) > LINES_LIMIT
    }
    assert not long


@pytest.mark.parametrize("package", packages())
def test_the_rooms_of_a_package_import_each_other_in_one_direction(package: str) -> None:
    floors(rooms(package))


def test_the_broker_has_few_import_floors() -> None:
    assert 1 < floors(rooms("services.broker")) <= FLOORS_LIMIT


def test_modules_of_one_name_are_told_apart_by_their_package() -> None:
    seen: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in modules():
        if "." in name:
            seen[tuple(name.split(".")[-2:])].append(name)
    assert not {key: names for key, names in seen.items() if len(names) > 1}


def test_a_cycle_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"import each other: \['a', 'b'\]"):
        floors({"a": {"b"}, "b": {"a"}, "c": set()})
    assert floors({"a": {"b"}, "b": {"c"}, "c": set()}) == 3
