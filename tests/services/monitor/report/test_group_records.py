"""The records of a long run are joined in parts, with the sums of a join at once."""

import random
import tempfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.errors import DamagedFileError, UnusablePathError
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.monitor.report import group_records as records_module
from rolloutmq.services.monitor.report.group_records import KINDS, Acked, Settled, group_records
from rolloutmq.services.monitor.report.settled_log import read_settled
from rolloutmq.services.monitor.report.summary import join_groups

ENVS = ("math", "sort3")


def write(path: Path, lines: Iterable[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def leave_run(layout: RunLayout, groups: int) -> None:
    """Leave the logs of a run with every fate, a resume, and groups of one name."""
    rng = random.Random(3)
    acked: dict[str, list[AckedGroup]] = {env: [] for env in ENVS}
    settled: list[SettledBatch] = []
    dropped: list[DroppedGroup] = []
    pulled: list[str] = []
    for number in range(groups):
        env, name = ENVS[number % 2], f"g-{number if number % 50 else 1}"
        split = Split.EVAL if number % 11 == 0 else Split.TRAIN
        acked[env].append(
            AckedGroup(group_id=name, session=1, seq=number, at=float(number), env=env, split=split)
        )
        if number % 7 == 0:
            dropped.append(DroppedGroup(at=float(number), group_id=name, state="expired", reason="stale"))
        elif split is Split.TRAIN and number % 13:
            pulled.append(name)
        if len(pulled) == 8:
            step = len(settled) + 1
            version = PolicyVersion(0, step - (step % 5 == 0))  # each fifth batch is without a step
            settled.append(
                SettledBatch(
                    at=float(number),
                    version=version,
                    trained=tuple(pulled[2:7]),
                    filtered=tuple(pulled[:2]),
                    rejected=tuple(pulled[7:]),
                    rewards=tuple(rng.random() for _ in range(7)),
                )
            )
            pulled = []
    cut = len(settled) - 4
    resume = SettledBatch(at=float(groups), version=PolicyVersion(1, settled[cut].version.step), resumed=True)
    for env in ENVS:
        write(layout.ack_log(env), acked[env])
    again = msgspec.structs.replace(settled[-1], version=PolicyVersion(1, settled[-1].version.step))
    write(layout.trained, [*settled, resume, again])
    write(layout.dropped, dropped)


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    found = RunLayout(run_dir)
    leave_run(found, 800)
    return found


def joined(layout: RunLayout) -> tuple[int, dict[str, Any]]:
    """Return the number of parts, and the sums of the join."""
    log = read_settled(layout)
    with group_records(layout, log) as records:
        found = join_groups(records, ["g-3", "g-9999"], as_of=700.0)
        courses = found.rewards.courses(len(log.step_points()))
        return records.parts, {
            "counts": dict(found.counts),
            "twice": found.trained_twice,
            "rewound": found.rewound,
            "acked_twice": found.acked_twice,
            "evaluated": found.evaluated,
            "rewards": courses,
        }


def test_many_parts_have_the_sums_of_one(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    one, at_once = joined(layout)
    monkeypatch.setattr(records_module, "PART_BYTES", 4000)
    monkeypatch.setattr(records_module, "BUFFER_BYTES", 300)
    many, in_parts = joined(layout)
    assert (one, many > 10) == (1, True)
    assert in_parts == at_once
    assert all(
        at_once["counts"][place] for place in ("trained", "filtered", "dead", "expired", "in_flight", "lost")
    )
    assert min(at_once["rewound"], at_once["acked_twice"], at_once["evaluated"]) > 0


def test_a_part_has_all_records_of_its_groups_and_the_files_go(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(records_module, "PART_BYTES", 4000)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: dict[str, int] = {}
    with group_records(layout, read_settled(layout)) as records:
        for part in records:
            names = {one.group.group_id for one in part.acked} | {one.group_id for one in part.settled}
            assert all(part.has(name) for name in names)
            for name in names:
                assert seen.setdefault(name, part.number) == part.number
        assert list(temporary.iterdir())
        assert sum(len(part.acked) for part in records) == 800, "a second iteration reads the same"
    assert not list(temporary.iterdir())


def test_only_wanted_kinds_are_read(layout: RunLayout) -> None:
    for kind in KINDS:
        with group_records(layout, read_settled(layout), kinds={kind}) as records:
            (part,) = records
            found = [bool(part.acked), bool(part.settled), bool(part.dropped)]
            assert found == [kind is Acked, kind is Settled, kind not in {Acked, Settled}]


def test_a_damaged_log_is_an_error(layout: RunLayout) -> None:
    log = read_settled(layout)
    with layout.dropped.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(DamagedFileError, match=r"dropped\.jsonl"), group_records(layout, log):
        raise AssertionError


def test_without_room_for_temporary_files_the_error_names_the_place(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(records_module, "PART_BYTES", 4000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with (
        pytest.raises(UnusablePathError, match=r"temporary directory .*gone"),
        group_records(layout, read_settled(layout)),
    ):
        raise AssertionError


def test_a_join_in_parts_takes_a_part_of_the_memory(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RunLayout(run_dir)
    leave_run(layout, 20_000)

    def peak() -> int:
        tracemalloc.start()
        try:
            joined(layout)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    at_once = peak()
    monkeypatch.setattr(records_module, "PART_BYTES", 100_000)
    monkeypatch.setattr(records_module, "BUFFER_BYTES", 1000)
    assert 3 * peak() < at_once
