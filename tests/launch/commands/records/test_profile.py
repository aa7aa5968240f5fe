"""`rolloutmq profile` of runs that were made by hand, and of one that ran."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.services.broker.journal.handmade import TRAINER, Handmade, began, flip, settles, version

from rolloutmq.launch.commands.records.profile import Profile, profile, profile_lines, seconds
from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.journal.format.events import Committed, Pulled
from rolloutmq.services.monitor.profile.usage import Usage, UsageLine


def recorded(run_dir: Path, durability: str = "disk") -> Handmade:
    made = Handmade(run_dir, durability)
    lines = [
        {
            "t": 10.0 + at,
            "topic": "pressure",
            "kind": "pressure",
            "epoch": 1,
            "trainers": 1,
            "settled_busy_s": 10.0 + at,
            "starved_s": 0.75 * at,
            "trainer_waits_s": {"no_batch": 0.75 * at},
        }
        for at in range(5)
    ]
    made.layout.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return made


def trained(made: Handmade) -> None:
    lease = made.lease([1, 2])
    made.log(
        began(),
        [made.accept(1), made.accept(2)],
        [lease, Pulled(lease.number, 0, TRAINER, "r")],
        [settles(lease, "g1", filtered=("g2",))],
        [Committed(TRAINER, version(1))],
    )


def test_a_person_sees_where_the_time_goes_and_each_hop(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(recorded(run_dir))
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    assert "the trainer waits 75% of its time for a batch (no_batch)\n    -> more workers" in told
    assert "the mean way of a group to the end of its step" in told
    rows = [line.split() for line in told.splitlines() if line.startswith("sort3")]
    assert [row[1] for row in rows] == ["rollout", "send", "queue", "train", "commit"]
    assert rows[0][2:5] == ["2", "1.50", "s"]
    assert rows[2][-1] == "g1"  # accepted a second before the other, and pulled with it


def test_a_program_gets_seconds(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(recorded(run_dir))
    assert profile(run_dir, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["starved_s"], told["trainer_s"]) == (3.0, 4.0)
    (rollout,) = (one for one in told["hops"] if one["hop"] == "rollout")
    assert rollout["groups"] == 2
    assert rollout["p50_s"] == pytest.approx(1.5, rel=0.011)
    assert rollout["mean_s"] == pytest.approx(1.5)


def test_without_a_journal_there_are_no_hops(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(run_dir, "memory")
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    assert "no_batch" in told
    assert "no hops: at durability `memory`" in told


def test_a_run_without_a_record_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Handmade(run_dir)
    assert profile(run_dir, as_json=False) == 1
    assert "nothing was recorded yet" in capsys.readouterr().err


def test_the_fields_are_those_of_the_event() -> None:
    own = {"t", "kind", "name", "busy", "env", "bound", "want"}
    own |= {"worker_states", "trimmed"}  # of the recorder
    assert set(UsageLine.__struct_fields__) - own <= set(Pressure.__struct_fields__)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0.00 us"), (8.4e-4, "840 us"), (0.0523, "52.3 ms"), (1.34, "1.34 s"), (3600.0, "3600 s")],
)
def test_durations_have_three_digits(value: float, shown: str) -> None:
    assert seconds(value) == shown


def test_damage_of_the_records_is_told_and_the_rest_counts(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorded(run_dir)
    trained(made)
    whole = made.layout.metrics.read_text()
    made.layout.metrics.write_text(f'{{"t": 1.0, "kind": "pre\n{whole}')
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    assert "the trainer waits 75% of its time" in told
    assert "not read: 1 line of metrics.jsonl, damaged" in told
    assert profile(run_dir, as_json=True) == 0
    assert "1 line of metrics.jsonl, damaged" in json.loads(capsys.readouterr().out)["not_read"]


def test_a_gap_in_the_journal_is_told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorded(run_dir)
    trained(made)
    flip(made.log_file(), made.log_file().stat().st_size // 2)
    assert profile(run_dir, as_json=False) == 0
    assert "not read: events-00000001.rmq: " in capsys.readouterr().out
    assert profile(run_dir, as_json=True) == 0
    assert any("damaged" in line for line in json.loads(capsys.readouterr().out)["not_read"])
    made.layout.metrics.unlink()
    made.log_file().write_bytes(b"no log")
    assert profile(run_dir, as_json=False) == 1
    told = capsys.readouterr().err
    assert "nothing was recorded yet" in told
    assert "not read: events-00000001.rmq" in told


def test_groups_for_evaluation_have_rows_of_their_own(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorded(run_dir)
    train, other = made.accept(1), made.accept(2)
    slow = msgspec.structs.replace(other.header, started_at=other.header.finished_at - 600.0)
    made.log(began(), [train, msgspec.structs.replace(other, split=Split.EVAL, header=slow)])
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    rows = [line.split("  ")[0] for line in told.splitlines() if line.startswith("sort3")]
    assert rows == ["sort3", "sort3", "sort3 (eval)", "sort3 (eval)"]
    assert "the mean way of a group to the end of its step, 3.00 s" in told
    assert profile(run_dir, as_json=True) == 0
    hops = json.loads(capsys.readouterr().out)["hops"]
    assert [(one["split"], one["groups"]) for one in hops] == [("train", 1)] * 2 + [("eval", 1)] * 2


def test_a_run_without_a_settled_batch_is_told_so() -> None:
    usage = Usage(start_s=3600.0)
    assert next(profile_lines(Profile(usage, [], True, {}, {}))) == (
        "where the time goes: 3600 s without a settled batch"
    )


def test_slots_that_the_record_lacks_are_told() -> None:
    usage = Usage(has_settled=True, trainer_s=60.0, unknown_slots_s=60.0)
    lines = profile_lines(Profile(usage, [], True, {}, {}))
    assert any("the rollout slots of 60.0 s are not known" in line for line in lines)
