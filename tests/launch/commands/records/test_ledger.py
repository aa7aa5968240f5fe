"""`rolloutmq ledger verify` answers a person and a program, and its exit code is the verdict."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.services.broker.journal.handmade import Handmade, batch, began, item, ledger, settles
from tests.services.broker.journal.other_versions import as_version, beginning, listing

from rolloutmq.launch.commands.records.ledger import verify, witness
from rolloutmq.launch.commands.steer import report
from rolloutmq.schemas.errors import DamagedFileError, RecordVersionError
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.services.broker.journal.format.events import Dropped, Numbers


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    made = Handmade(run_dir)
    lease = made.lease([1])
    events = [lease, settles(lease, "g1"), Dropped(2, "expired", "stale")]
    made.log(began(), [made.accept(order) for order in (1, 2, 3)], events)
    made.acked("g1", "g2", "g3")
    made.trained(batch(1, "g1"))
    return made


def test_a_ledger_that_adds_up(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(made.layout.root, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recorded"], found["ok"], found["problems"], found["since"]) == (True, True, [], None)
    assert found["accepted"] == sum(found["counts"].values()) == 3
    assert (found["counts"]["queued"], found["counts"]["trained"], found["counts"]["expired"]) == (1, 1, 1)
    assert found["reasons"] == {"expired(stale)": 1}
    assert (found["groups_checked"], found["rewound"], found["logs"]) == (2, 0, 1)
    assert found["bytes_checked"] == sum(made.groups[order].header.nbytes for order in (1, 3))


def test_a_ledger_that_does_not_names_the_groups(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    made.acked("g1", "g2", "g3", "g4")
    made.segment().unlink()
    assert verify(made.layout.root, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert {problem.get("group_id") for problem in found["problems"]} == {"g1", "g3", "g4"}
    assert verify(made.layout.root, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "accepted  3 = 1 queued + 1 trained + 1 expired"
    assert "problem   group g1 (order 1) is trained, and its segment groups-00000001.rmq is gone" in lines
    assert lines[-1] == "3 problems"


def test_a_history_that_was_pruned_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Handmade(run_dir)
    made.log([Numbers(9, 0, 0), item(made.accept(8)), ledger(8, queued=1, committed=7)])
    assert verify(run_dir, as_json=False) == 0
    assert any(line.startswith("since     ") for line in capsys.readouterr().out.splitlines())


def test_at_memory_nothing_is_recorded(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Handmade(run_dir, durability="memory")
    assert verify(run_dir, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"recorded": False}
    assert verify(run_dir, as_json=False) == 0
    assert capsys.readouterr().out.startswith("not recorded")


def test_at_memory_a_saved_state_of_another_version_is_an_error(run_dir: Path) -> None:
    Handmade(run_dir, durability="memory")
    RunLayout(run_dir).saved.write_bytes(beginning(b"12345678", 2))
    before = listing(run_dir)
    with pytest.raises(RecordVersionError, match="got version 2"):
        verify(run_dir, as_json=False)
    with pytest.raises(RecordVersionError, match="got version 2"):
        report(run_dir, as_json=False)
    assert listing(run_dir) == before


def test_a_log_of_others_that_is_damaged_is_an_error(made: Handmade) -> None:
    made.layout.trained.write_bytes(b"{\n")
    with pytest.raises(DamagedFileError):
        verify(made.layout.root, as_json=True)


def test_in_a_hurry_the_groups_are_not_read(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(made.segment().read_bytes())
    data[-80] ^= 1
    made.segment().write_bytes(data)
    assert verify(made.layout.root, as_json=True, quick=True) == 0
    assert verify(made.layout.root, as_json=True) == 1
    assert "is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kept", ["*", "facts-*"])
def test_records_of_another_version_are_an_error_and_no_damage(
    made: Handmade, *, kept: str, quick: bool
) -> None:
    for path in list(made.journal.iterdir()):
        if not as_version(path, 2).match(kept):
            path.unlink()
    before = listing(made.layout.root)
    with pytest.raises(RecordVersionError, match="got version 2"):
        verify(made.layout.root, as_json=False, quick=quick)
    assert listing(made.layout.root) == before


def test_a_trainer_of_ones_own_is_checked_against_the_log_of_the_broker(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes no log here; what the broker says was trained must be trained."""
    made = Handmade(run_dir)
    lease = made.lease([1])
    made.log(began(), [made.accept(order) for order in (1, 2)], [lease, settles(lease, "g1")])
    again = [batch(1, "g1"), batch(1, "g1")]  # the line of a resume between them was lost with the broker
    made.layout.settled.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in again))
    assert verify(made.layout.root, as_json=True) == 0
    capsys.readouterr()
    made.layout.settled.write_bytes(msgspec.json.encode(batch(1, "g1", "g2", "g7")) + b"\n")
    assert verify(made.layout.root, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert {one.get("group_id"): one["what"] for one in found["problems"]} == {
        "g2": "was trained, and is queued",
        "g7": "was trained, and was never accepted",
    }


def test_the_witness_is_that_of_its_moment(run_dir: Path) -> None:
    """It is read after the journal, which lacks what was added meanwhile."""
    layout = RunLayout(run_dir)
    layout.acks.mkdir()
    with layout.ack_log("p").open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(AckedGroup(group_id="g1", session=1, seq=1, at=1.0)) + b"\n")
        found = witness(layout)
        file.write(msgspec.json.encode(AckedGroup(group_id="g2", session=1, seq=2, at=1.0)) + b"\n")
    assert [one.group_id for one in found.acked] == ["g1"]
