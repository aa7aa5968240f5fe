"""`docs/renames.tsv`: old names of modules and classes, and the names they have now."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOVED_AGAIN = ("rolloutmq.services.inference.vllm",)
"""Packages whose modules load only inside other software."""


def rows(*kinds: str) -> Iterator[tuple[str, str]]:
    head, *lines = (ROOT / "docs" / "renames.tsv").read_text().splitlines()
    assert head.split("\t") == ["kind", "old", "new"]
    for line in lines:
        kind, old, new = line.split("\t")
        if kind in kinds:
            yield old, new


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_every_new_module_is_there_and_no_old_one() -> None:
    moved = dict(rows("module"))
    assert len(moved) > 200
    assert not [new for new in moved.values() if not exists(new)]
    packages = {new.rpartition(".")[0] for new in moved.values()}
    assert not [old for old in moved if exists(old) and old not in {*packages, *moved.values()}]


def test_every_new_name_is_there() -> None:
    found = list(rows("class", "function", "name"))
    assert len(found) > 100
    missing = []
    for _, new in found:
        module, _, name = new.rpartition(".")
        if not module.startswith(MOVED_AGAIN) and not hasattr(import_module(module), name):
            missing.append(new)
    assert not missing
