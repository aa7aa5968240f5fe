"""`rolloutmq profile` of runs that were made by hand, and of one that ran."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.broker.journal.handmade import TRAINER, Handmade, began, flip, settles, version

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.commands.records.latency_table import seconds
from rolloutmq.launch.commands.records.profile import Profile, latencies, profile, profile_lines
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.services.broker.journal.format.events import Committed, Pulled
from rolloutmq.services.broker.journal.inspect.hops import HopKey, Slowest
from rolloutmq.services.monitor.profile.latencies import By
from rolloutmq.services.monitor.profile.usage import Usage, UsageLine
from rolloutmq.services.telemetry.recorder import line_of


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


def test_groups_accepted_just_before_a_kill_count(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their records are durable, and the event log ends before them."""
    made = recorded(run_dir)
    made.log(began(), [made.accept(1)])
    made.accept(2)
    assert profile(run_dir, as_json=True) == 0
    hops = {one["hop"]: one["groups"] for one in json.loads(capsys.readouterr().out)["hops"]}
    assert hops == {"rollout": 2, "send": 2}


def test_the_starved_part_has_both_bases(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorded(run_dir)
    trained(made)
    write_json(made.layout.lives, [Life(10.0, 14.0), Life(20.0, 26.0)])
    assert profile(run_dir, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["starved_of_run"], told["starved"]) == (0.3, 0.75)
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    assert "  trainer starved: 30% of the whole run, 75% from the first batch\n" in told


def test_a_program_gets_seconds(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(recorded(run_dir))
    assert profile(run_dir, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["starved_s"], told["trainer_s"]) == (3.0, 4.0)
    (rollout,) = (one for one in told["hops"] if one["hop"] == "rollout")
    assert rollout["groups"] == 2
    assert rollout["p50_s"] == pytest.approx(1.5, rel=0.011)
    assert rollout["mean_s"] == pytest.approx(1.5)


def sampled(made: Handmade, name: str, *rows: LatencyRow, at: float = 12.0, host: str = "h1") -> None:
    """Append a latency sample to the record."""
    sample = LatencySample(name=name, number=1, at=at, since_s=2.0, host=host, rows=rows)
    with made.layout.metrics.open("ab") as record:
        record.write(line_of(b"telemetry.latency.x", sample, at))


def hop(name: Hop, *durations_s: float, **given: Any) -> LatencyRow:
    durations = HistogramBuilder().add(durations_s).histogram()
    return LatencyRow(hop=name, durations=durations, env="sort3", slowest_s=max(durations_s), **given)


def test_no_percentile_exceeds_the_slowest(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket stands for its middle, which is above some of its durations."""
    made = recorded(run_dir, "memory")
    durations = [0.301 * 1.003**step for step in range(8)]
    assert any(HistogramBuilder().add(one).percentile_s(99.9) > one for one in durations)
    for number, one in enumerate(durations):
        row = msgspec.structs.replace(hop(Hop.QUEUE, one), env=f"e{number}")
        sampled(made, "broker", row)
        sampled(made, f"w{number}", hop(Hop.CALL, one, engine=f"e{number}"))
    assert profile(run_dir, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)["hops"]
    assert latencies(run_dir, By.ENGINE, as_json=True) == 0
    rows += json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * len(durations)
    assert [one for one in rows if max(one["p50_s"], one["p99.9_s"]) > one["slowest_s"]] == []


def test_without_a_journal_and_without_samples_there_are_no_hops(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(run_dir, "memory")
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    assert "no_batch" in told
    assert "no hops: at durability `memory`" in told


def test_without_a_journal_the_hops_are_those_of_the_samples(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorded(run_dir, "memory")
    sampled(made, "broker", hop(Hop.ROLLOUT, 1.0, 3.0, tokens=400, slowest_id="g7"), hop(Hop.QUEUE, 0.5))
    sampled(made, "sort3-0", hop(Hop.ROLLOUT, 1.0))  # one of those that the broker tells
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    assert "the mean way of a group to the end of its step, 2.50 s" in told
    (rollout, queue) = (line.split() for line in told.splitlines() if line.startswith("sort3"))
    assert rollout[1:5] == ["rollout", "2", "2.00", "s"]
    assert rollout[-5:] == ["1.00", "200", "3.00", "s", "g7"]  # two in two seconds
    assert queue[1] == "queue"
    assert profile(run_dir, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sampled"]
    assert not found["recorded"]
    assert (found["hops"][0]["groups_per_s"], found["hops"][0]["tokens_per_s"]) == (1.0, 200.0)


def test_the_journal_tells_the_hops_and_the_samples_their_rates(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorded(run_dir)
    trained(made)
    sampled(made, "broker", hop(Hop.ROLLOUT, 9.0, tokens=100))
    assert profile(run_dir, as_json=True) == 0
    rollout, send, *_ = json.loads(capsys.readouterr().out)["hops"]
    assert (rollout["groups"], rollout["groups_per_s"], rollout["clock_error_s"]) == (2, 0.5, 0.0)
    assert rollout["mean_s"] == pytest.approx(1.5)
    assert send["groups_per_s"] is None


def test_between_two_clocks_the_samples_tell_the_way_and_its_error(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorded(run_dir)
    trained(made)
    sampled(made, "broker", hop(Hop.SEND, 0.001, 0.001, 0.001, 0.25, clock_error_s=0.004))
    assert profile(run_dir, as_json=False) == 0
    (send,) = (line for line in capsys.readouterr().out.splitlines() if " send " in line and "sort3" in line)
    assert send.split()[:6] == ["sort3", "send", "4", "63.2", "ms", "<"]
    assert "< 4.00 ms" in send
    assert profile(run_dir, as_json=True) == 0
    (told,) = (one for one in json.loads(capsys.readouterr().out)["hops"] if one["hop"] == "send")
    assert (told["clock_error_s"], told["groups"]) == (0.004, 4)


def test_latencies_by_a_part_have_rates_and_classes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recorded(run_dir)
    failed = hop(Hop.CALL, 5.0, engine="inference", status="5xx")
    sampled(made, "sort3-0", hop(Hop.CALL, 0.5, 0.5, engine="inference", status="2xx", tokens=64), failed)
    sampled(made, "sort3-1", hop(Hop.CALL, 1.0, engine="inference", status=""), host="h2")
    assert latencies(run_dir, By.ENGINE, as_json=False) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("inference")]
    assert [row[:4] for row in rows] == [
        ["inference", "call", "none", "1"],
        ["inference", "call", "2xx", "2"],
        ["inference", "call", "5xx", "1"],
    ]
    assert rows[1][-4:] == ["1.00", "32", "500", "ms"]
    assert latencies(run_dir, By.HOST, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["by"] == "host"
    assert {one["host"]: one["count"] for one in told["rows"] if one["status"] != "5xx"} == {"h1": 2, "h2": 1}


def test_a_part_without_latencies_says_why(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorded(run_dir)
    assert latencies(run_dir, By.GPU, as_json=False) == 1
    assert "no latency by gpu was recorded: no process with GPUs of its own" in capsys.readouterr().err
    with made.layout.metrics.open("a") as record:
        record.write('{"kind": "latency_sample", "rows": 7}\n')
    assert latencies(run_dir, By.ROUTE, as_json=False) == 1
    assert "not read: 1 line of metrics.jsonl, damaged" in capsys.readouterr().err


def test_a_run_without_a_record_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Handmade(run_dir)
    assert profile(run_dir, as_json=False) == 1
    assert "nothing was recorded yet" in capsys.readouterr().err


def test_a_record_without_a_group_or_a_trainer_is_told(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its telemetry was started after the last group, at a broker without a journal: it said that nothing was there."""
    made = Handmade(run_dir, "memory")
    line = {"t": 5.0, "kind": "pressure", "epoch": 1, "settled_busy_s": 9.0}
    made.layout.metrics.write_bytes(msgspec.json.encode(line) + b"\n")
    assert profile(run_dir, as_json=False) == 0
    told = capsys.readouterr().out
    assert "no trainer has settled a batch and gone on" in told
    assert "no hops: at durability `memory` the broker keeps no journal" in told


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


def test_every_view_counts_the_same_damaged_lines(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorded(run_dir)
    trained(made)
    sampled(made, "w", hop(Hop.CALL, 1.0, engine="a"))
    with made.layout.metrics.open("ab") as record:
        record.write(
            b'{"t":1.0,"kind":"latency_sample","rows":7}\n{"t":1.0,"kind":"step_done","step":"x"}\n{"t":1\n'
        )
    assert profile(run_dir, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["not_read"] == ["3 lines of metrics.jsonl, damaged"]
    assert latencies(run_dir, By.ENGINE, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["not_read"] == ["3 lines of metrics.jsonl, damaged"]


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


def test_of_a_thousand_environments_the_slowest_are_shown() -> None:
    hops = {
        HopKey(f"env-{number:04}", Hop.ROLLOUT, Split.TRAIN): HistogramBuilder()
        .add([1.0 + number])
        .histogram()
        for number in range(1000)
    }
    slowest = {key: Slowest(one.total_s, "g") for key, one in hops.items()}
    told = [*profile_lines(Profile(Usage(), [], True, hops, slowest))]
    rows = [line.split()[0] for line in told if line.startswith("env-")]
    assert rows == [f"env-{number:04}" for number in range(1000 - 64, 1000)]
    assert told[-1] == "936 more environments with less time; `--json` has all"


def test_a_run_without_a_settled_batch_is_told_so() -> None:
    usage = Usage(start_s=3600.0)
    assert next(profile_lines(Profile(usage, [], True, {}, {}))) == (
        "where the time goes: 3600 s without a settled batch"
    )


def test_slots_that_the_record_lacks_are_told() -> None:
    usage = Usage(has_settled=True, trainer_s=60.0, unknown_slots_s=60.0)
    lines = profile_lines(Profile(usage, [], True, {}, {}))
    assert any("the rollout slots of 60.0 s are not known" in line for line in lines)


def test_a_record_without_the_start_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(run_dir)
    assert profile(run_dir, as_json=False) == 0
    assert (
        "from the first recorded batch on; the record lacks the start of the run" in capsys.readouterr().out
    )
    assert profile(run_dir, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["start_s"] is None


def test_no_percentile_of_the_examples_exceeds_the_slowest() -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "profiling.md").read_text()
    example = r"(?:[\d,]+ +)?((?:[\d.]+ (?:us|ms|s)  +){5}).*?([\d.]+ (?:us|ms|s)) \S+$"
    rows = re.findall(example, guide, re.MULTILINE)
    assert len(rows) >= 5
    for cells, slowest in rows:
        _, *percentiles = (in_seconds(cell) for cell in re.split("  +", cells.strip()))
        assert sorted(percentiles) == percentiles
        assert percentiles[-1] <= in_seconds(slowest)


def in_seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
