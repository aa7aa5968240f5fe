"""`rolloutmq explain` tells a group's story, and what is left of it where nothing is recorded."""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.services.broker.journal.handmade import Handmade, batch, began, ledger, settles
from tests.services.broker.journal.other_versions import as_version, listing

from rolloutmq.launch.commands.records.explain import explain
from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.schemas.files import DroppedGroup
from rolloutmq.schemas.printable import moment
from rolloutmq.services.broker.journal.format.events import Numbers, Pulled
from rolloutmq.services.process.clock_log import ClockLog, Measured


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    made = Handmade(run_dir)
    lease = made.lease([1])
    events = [lease, Pulled(1, 0, "trainer-0", "r 1"), settles(lease, "g1")]
    made.log(began(), [made.accept(1)], events)
    made.acked("g1")
    made.trained(batch(1, "g1"))
    return made


def test_a_person_reads_a_timeline(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(made.layout.root, "g1", as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "group g1, order 1: trained"
    assert "  from          sort3-0, environment sort3 (train), task t-1" in lines
    assert "  number        1 of session 7" in lines
    assert "  policy        0.1 to 0.2" in lines
    assert "  rewards       mean 0.625, 0.25 to 1" in lines
    assert "  stored in     groups-00000001.rmq at 24" in lines
    told = [line.split()[2:] for line in lines if line.startswith("  19") or line.startswith("  20")]
    assert [words[0] for words in told] == ["accepted", "leased", "handed", "settled", "acked", "trained"]
    assert told[1] == ["leased", "lease=1", "step=1", "policy=0.0", "by=trainer", "rank=0", "sequences=2"]
    assert told[2] == ["handed", "out", "lease=1", "consumer=trainer-0", 'request="r', '1"']
    assert told[4] == ["acked", "producer=sort3-0", "session=7", "seq=1"]


def test_a_group_without_times_shows_none(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Handmade(run_dir)
    timed = made.accept(1)
    made.log(began(), [replace(timed, header=replace(timed.header, started_at=0.0, finished_at=0.0))])
    assert explain(run_dir, "g1", as_json=False) == 0
    told = capsys.readouterr().out
    assert "  policy        0.1 to 0.2\n  rewards  " in told
    assert "  rollout " not in told


@pytest.mark.parametrize(("ended_s", "is_ahead"), [(-1.5, False), (7200.0, True)])
def test_the_clock_of_another_host_is_told_where_it_is_ahead(
    run_dir: Path, capsys: pytest.CaptureFixture[str], ended_s: float, is_ahead: bool
) -> None:
    made = Handmade(run_dir)
    group = made.accept(1)
    ended = group.at + ended_s
    made.log(
        began(), [replace(group, header=replace(group.header, started_at=ended - 1.0, finished_at=ended))]
    )
    assert explain(run_dir, "g1", as_json=False) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  rollout "))
    assert ("; by the clock of its worker, at least 7200.000 s ahead of the broker's" in told) is is_ahead


@pytest.mark.parametrize("offset_s", [-3600.0, 7200.0])
def test_times_of_another_host_are_those_of_the_brokers_clock(
    run_dir: Path, capsys: pytest.CaptureFixture[str], offset_s: float
) -> None:
    """They were those of the worker, and a clock that was behind was told by nothing."""
    made = Handmade(run_dir)
    group = made.accept(1)
    ended = group.at - 0.5 - offset_s
    header = replace(group.header, started_at=ended - 1.0, finished_at=ended)
    made.log(began(), [replace(group, header=header)])
    log = ClockLog(made.layout.clocks)
    log.note({"another": Measured(5.0, 0.1), group.producer: Measured(offset_s, 0.002)}, group.at - 60.0)
    log.note({group.producer: Measured(offset_s + 9.0, 0.002)}, group.at + 60.0)
    assert explain(run_dir, "g1", as_json=False) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  rollout "))
    assert (
        f"{moment(group.at - 1.5, 'milliseconds')} to {moment(group.at - 0.5, 'milliseconds')}, 1.000 s"
        in told
    )
    side = "behind" if offset_s > 0 else "ahead of"
    assert told.endswith(
        f"; the clock of its worker was {abs(offset_s):.3f} s {side} the broker's (± 0.002 s)"
    )


def test_a_program_reads_json(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(made.layout.root, "g1", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["group_id"], found["recorded"]) == ("g1", True)
    (group,) = found["groups"]
    assert (group["order"], group["state"], group["place"]) == (1, "trained", {"segment": 1, "offset": 24})
    assert group["origin"]["producer"] == "sort3-0"
    assert [moment["event"] for moment in group["moments"]] == ["accepted", "leased", "handed out", "settled"]
    assert [moment["event"] for moment in found["logs"]] == ["acked", "trained"]


def test_an_id_that_nobody_knows(made: Handmade, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(made.layout.root, "g9", as_json=False) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "g9: no such group in" in captured.err


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_what_the_logs_say_is_told_where_the_journal_knows_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str], durability: str
) -> None:
    made = Handmade(run_dir, durability)
    if durability == "disk":
        made.log([Numbers(5, 0, 0), ledger(4, committed=4)])
    made.acked("g1")
    made.trained(batch(1, "g0", filtered=("g1",), rewound=True))
    made.dropped(DroppedGroup(at=5.0, group_id="g1", state="dead", reason="odd"))
    assert explain(run_dir, "g1", as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    told = "not recorded at durability `memory`" if durability == "memory" else "not in the journal"
    assert told in lines[0]
    assert [line.split(maxsplit=2)[2].split()[0] for line in lines[2:]] == ["acked", "filtered", "dead"]
    assert explain(run_dir, "g1", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recorded"], found["groups"]) == (durability == "disk", [])
    assert found["logs"][1]["details"] == {"policy": "0.1", "rewound": True}
    assert explain(run_dir, "g2", as_json=False) == 1


@pytest.mark.parametrize("kept", ["*", "facts-*"])
def test_records_of_another_version_are_an_error(made: Handmade, kept: str) -> None:
    for path in list(made.journal.iterdir()):
        if not as_version(path, 2).match(kept):
            path.unlink()
    before = listing(made.layout.root)
    with pytest.raises(RecordVersionError, match="got version 2"):
        explain(made.layout.root, "g1", as_json=False)
    assert listing(made.layout.root) == before


def test_the_log_of_the_broker_tells_of_a_trainer_of_ones_own(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Handmade(run_dir)
    lease = made.lease([1])
    made.log(began(), [made.accept(1)], [lease, settles(lease, "g1")])
    made.layout.settled.write_bytes(msgspec.json.encode(batch(1, "g1")) + b"\n")
    assert explain(run_dir, "g1", as_json=True) == 0
    assert [one["event"] for one in json.loads(capsys.readouterr().out)["logs"]] == ["trained"]


def test_a_trainer_of_ones_own_may_follow_the_shipped_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of the shipped trainer names no group of the other, that of the broker those of both."""
    made = Handmade(run_dir)
    lease = made.lease([1, 2])
    made.log(began(), [made.accept(1), made.accept(2)], [lease, settles(lease, "g1", "g2")])
    made.trained(batch(1, "g1"))
    own = replace(batch(2, "g2"), consumer="mine")
    made.layout.settled.write_bytes(
        msgspec.json.encode(batch(1, "g1")) + b"\n" + msgspec.json.encode(own) + b"\n"
    )
    told = {}
    for name in ("g1", "g2"):
        assert explain(run_dir, name, as_json=True) == 0
        (one,) = json.loads(capsys.readouterr().out)["logs"]
        told[name] = one["event"], one["details"]
    assert told["g1"] == ("trained", {"step": 1, "policy": "0.1"})
    assert told["g2"] == ("trained", {"step": 2, "policy": "0.2", "consumer": "mine"})
