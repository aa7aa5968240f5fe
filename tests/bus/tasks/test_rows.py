"""Rows keep their numbers: a permutation without a table, and files that all workers map."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import scenario
from rolloutmq.bus.tasks.rows import Permutation, Rows, open_rows
from rolloutmq.schemas.config.environment import DatasetConfig
from rolloutmq.schemas.errors import ConfigError, MissingError

KEY = "environment.sums.dataset"
DEADLINE_S = 30.0
ENVIRONMENT = """
from pathlib import Path
from rolloutmq import RowTurn

class First(RowTurn):
    max_tokens = 2

    def seen(self, name, row):
        with (Path(__file__).parent / f"{name}.seen").open("a") as file:
            file.write(row["question"] + "\\n")
        return row

    def task_at(self, index, rng):
        return self.seen("train", super().task_at(index, rng))

    def eval_task_at(self, index, rng):
        return self.seen("eval", super().eval_task_at(index, rng))

    def prompt(self, task):
        return task["question"]

    def score(self, task, completion):
        return float(completion.text == task["answer"])
"""
CONFIG = """
[environment.first]
entry = "env.py:First"
task_count = 80
min_workers = 2

[environment.first.dataset]
path = "sums.jsonl"
eval_rows = 20

[curriculum.first]
sampler = "uniform"

[evaluation]
enabled = true
tasks = 20
every = 0

[trainer]
steps = 3
batch_sequences = 64
"""
CARD = """---
configs:
- config_name: a
  data_files:
  - split: train
    path: a/train.jsonl
- config_name: b
  data_files:
  - split: train
    path: b/train.jsonl
---
"""
MAPPED = """
import sys
from pathlib import Path
from rolloutmq.bus.tasks.rows import open_rows
from rolloutmq.schemas.config.environment import DatasetConfig

train, _ = open_rows("key", DatasetConfig(path="sums.jsonl"), Path(sys.argv[1]))
table = train._table
assert type(table.data).__name__ == "MemoryMappedTable", table.data
assert "torch" not in sys.modules
print(table.cache_files[0]["filename"], train[0]["question"])
"""


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000])
def test_a_permutation_has_each_number_once(count: int) -> None:
    order = Permutation(count, 7)
    found = [order[index] for index in range(count)]
    assert sorted(found) == list(range(count))
    assert found == [Permutation(count, 7)[index] for index in range(count)]
    for beyond in (-1, count):
        with pytest.raises(IndexError):
            order[beyond]


def test_the_seed_gives_the_order() -> None:
    first, second = ([Permutation(1000, seed)[index] for index in range(1000)] for seed in (0, 1))
    assert first != second
    assert sum(index == number for index, number in enumerate(first)) < 10
    assert Permutation(1 << 40, 0)[12345] < 1 << 40  # nothing grows with the number of rows


def test_parts_of_a_table_share_no_row() -> None:
    table = [{"n": number} for number in range(10)]
    order = Permutation(10, 3)
    held, train = Rows(table, order, range(4)), Rows(table, order, range(4, 10))
    assert {row["n"] for row in held} | {row["n"] for row in train} == set(range(10))
    assert (len(held), len(train), train[-1], train[1:3][0]) == (4, 6, train[5], train[1])
    with pytest.raises(IndexError, match="row 6 of 6"):
        train[6]


@pytest.mark.parametrize(("name", "value"), [("subset", "main"), ("files", ("*.jsonl",))])
def test_a_file_has_no_parts_to_choose(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.bus.tasks.rows.importlib.util.find_spec", lambda _name: object())
    (tmp_path / "sums.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        open_rows(KEY, DatasetConfig.model_validate({"path": "sums.jsonl", name: value}), tmp_path)
    assert str(caught.value) == (
        f"{KEY}.{name}: is only for a directory or a data set of a hub (got {value!r} with sums.jsonl); remove it"
    )


def test_without_the_package_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingError, match=r"the package datasets is missing.*\[data\]"):
        open_rows(KEY, DatasetConfig(path="sums.jsonl"), tmp_path)


def sums(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{number} and 1?", "answer": str(number + 1)} for number in range(count)]


@pytest.mark.rival
class TestFiles:
    """What `datasets` reads, in the environment that has it: `make test-data`."""

    @pytest.fixture(autouse=True)
    def apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # in the processes of a test
        lines = map(json.dumps, sums(100))
        (tmp_path / "sums.jsonl").write_text("\n".join(lines) + "\n")

    def opened(self, base_dir: Path, **section: Any) -> tuple[Rows, Rows]:
        return open_rows(KEY, DatasetConfig.model_validate({"path": "sums.jsonl", **section}), base_dir)

    def refusal(self, base_dir: Path, **section: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            self.opened(base_dir, **section)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    def test_rows_are_shuffled_by_the_seed_and_held_out(self, tmp_path: Path) -> None:
        train, held = self.opened(tmp_path, eval_rows=20)
        assert (len(train), len(held)) == (80, 20)
        questions = [row["question"] for part in (train, held) for row in part]
        assert sorted(questions) == sorted(row["question"] for row in sums(100))
        assert [*self.opened(tmp_path, eval_rows=20)[0]] == [*train]
        assert [*self.opened(tmp_path, eval_rows=20, seed=1)[0]] != [*train]
        everything, same = self.opened(tmp_path)
        assert same is everything
        assert [*everything][:20] == [*held]

    def test_a_directory_has_splits(self, tmp_path: Path) -> None:
        directory = tmp_path / "sums"
        directory.mkdir()
        for split, count in (("train", 6), ("test", 3)):
            (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, sums(count))))
        train, held = self.opened(tmp_path, path="sums", eval_split="test")
        assert (len(train), len(held)) == (6, 3)
        assert len(self.opened(tmp_path, path="sums", files=["test.jsonl"])[0]) == 3
        wrong = self.refusal(tmp_path, path="sums", split="dev")
        assert wrong.startswith(f"{KEY}.split: sums has no such split: ")
        wrong = self.refusal(tmp_path, path="sums", eval_split="dev")
        assert wrong.startswith(f"{KEY}.eval_split: ")

    def test_a_snapshot_of_a_hub_has_subsets(self, tmp_path: Path) -> None:
        """Its files are links to blobs, and its card says which belong to a split."""
        directory, blobs = tmp_path / "snapshots" / "c0ffee", tmp_path / "blobs"
        blobs.mkdir()
        files = {"README.md": CARD}
        files |= {f"{subset}/train.jsonl": json.dumps(sums(5)[at]) for at, subset in enumerate(("a", "b"))}
        for number, (name, text) in enumerate(files.items()):
            (blobs / str(number)).write_text(text)
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).symlink_to(blobs / str(number))
        for at, subset in enumerate(("a", "b")):
            assert [*self.opened(tmp_path, path=str(directory), subset=subset)[0]] == [sums(5)[at]]
        assert self.refusal(tmp_path, path=str(directory), subset="c").startswith(f"{KEY}.subset: ")
        assert self.refusal(tmp_path, path=str(directory)).startswith(f"{KEY}.subset: ")

    def test_parquet_gives_the_same_rows_as_json(self, tmp_path: Path) -> None:
        datasets: Any = pytest.importorskip("datasets")
        datasets.Dataset.from_list(sums(100)).to_parquet(str(tmp_path / "sums.parquet"))
        assert [*self.opened(tmp_path, path="sums.parquet")[0]] == [*self.opened(tmp_path)[0]]

    def test_what_is_wrong_is_told_by_its_key(self, tmp_path: Path) -> None:
        (tmp_path / "sums.txt").write_text("")
        (tmp_path / "torn.jsonl").write_text('{"question": ')
        assert self.refusal(tmp_path, path="none.jsonl").startswith(
            f"{KEY}.path: there is no file or directory {tmp_path}/none.jsonl; "
        )
        assert self.refusal(tmp_path, path="sums.txt").startswith(f"{KEY}.path: must be a file of .jsonl, ")
        assert self.refusal(tmp_path, path="torn.jsonl").startswith(
            f"{KEY}.path: torn.jsonl cannot be read: "
        )
        assert self.refusal(tmp_path, eval_rows=100).startswith(f"{KEY}.eval_rows: must leave rows")

    def test_all_workers_map_the_same_file(self, tmp_path: Path) -> None:
        """The first converts it, the others wait for that; none has a copy of its own."""
        command = [sys.executable, "-c", MAPPED, str(tmp_path)]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        try:
            told = {worker.communicate(timeout=300)[0] for worker in workers}
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(DEADLINE_S)
        assert [worker.returncode for worker in workers] == [0, 0, 0]
        assert len(told) == 1
        assert ".arrow" in told.pop()
        assert len([*(tmp_path / "cache").rglob("*.arrow")]) == 1

    def test_a_run_trains_on_rows_and_evaluates_held_out_ones(self, tmp_path: Path) -> None:
        (tmp_path / "env.py").write_text(ENVIRONMENT)
        (tmp_path / "config.toml").write_text(CONFIG)
        made = [
            {"question": f"{number % 10}{number // 10}=", "answer": str(number % 10)} for number in range(100)
        ]
        (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, made)))
        code, summary = scenario.run(tmp_path / "run", config=tmp_path / "config.toml")
        assert (code, summary["steps"]) == (0, 3)
        assert summary["groups_lost"] == summary["groups_dead"] == 0
        train, held = self.opened(tmp_path, eval_rows=20)
        for name, part in (("train", train), ("eval", held)):
            seen = set((tmp_path / f"{name}.seen").read_text().split())
            assert seen <= {row["question"] for row in part}
            assert len(seen) > 4
