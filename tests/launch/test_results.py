"""The comparison over the files of a run: what is described where, what is damaged, and what nobody knows.

`rolloutmq report` over the files of a run, for a person and for a program, also where lines are damaged.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.broker.journal.handmade import (
    Handmade,
    batch,
    began,
    item,
    ledger,
    make_group,
    settles,
    write_lines,
)

from rolloutmq import Consumer, Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.commands.records.ledger import check
from rolloutmq.launch.results import Survey, survey, unread
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import AckedGroup, DroppedGroup, Endpoints, RunLayout, SettledBatch
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.format.events import Dropped, Numbers
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.dashboard.record.damage import damaged_lines
from rolloutmq.services.monitor.liveness import fate_of
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.services.worker.user_code.failures import UserFailure


def acked(name: str) -> AckedGroup:
    return AckedGroup(
        group_id=name,
        session=1,
        seq=1,
        at=1.0,
        env="sort3",
        sequences=2,
        tokens=5,
        duration_s=1.5,
        reward=0.5,
    )


def fates(found: Survey, env: str = "sort3") -> dict[str, int]:
    return found.bias.environments[env].fates


def test_logs_alone_are_enough_without_a_journal(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_lines(layout.ack_log("sort3-0"), [acked("a"), acked("b"), acked("a")])
    write_lines(layout.ack_log("sort3-1"), [acked("c"), acked("d"), acked("e")])
    write_lines(layout.trained, [batch(1, "a", filtered=("b",))])
    write_lines(layout.dropped, [DroppedGroup(at=1.0, group_id="c", state="expired", reason="stale")])
    found = survey(layout, ["d"])
    assert fates(found) == {"trained": 1, "filtered": 1, "expired": 1, "in_flight": 1, "lost": 1}
    assert found.bias.environments["sort3"].produced.length == 2.5
    assert (found.bias.undescribed, list(unread(found))) == ({}, [])


def test_journal_describes_what_no_line_does(run_dir: Path) -> None:
    made = Handmade(run_dir)
    first = made.accept(1)
    made.log([*began(), item(first)], [made.accept(2)], [made.accept(3), made.accept(4)])
    made.acked("g1", "g2")  # As an earlier version wrote it.
    made.trained(batch(1, "g1", "g3", filtered=("g9",)))
    found = survey(made.layout, ["g4"])
    assert fates(found) == {"trained": 2, "in_flight": 1, "lost": 1}
    assert found.bias.undescribed == {"filtered": 1}
    produced = found.bias.environments["sort3"].produced
    assert (produced.sequences, produced.length, produced.duration, produced.reward) == (8, 2.5, 1.5, 0.625)


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_group_that_nothing_describes_is_counted(run_dir: Path, durability: str) -> None:
    made = Handmade(run_dir, durability)
    if durability == "disk":
        made.log([Numbers(5, 0, 0), ledger(4, committed=4)])
    made.acked("g1")
    made.trained(batch(1, "g1", "g2"))
    found = survey(made.layout, [])
    assert (found.bias.environments, found.bias.undescribed) == ({}, {"trained": 2})


def test_damaged_lines_are_counted_and_skipped(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_lines(layout.ack_log("sort3-0"), [acked("a"), acked("b")])
    write_lines(layout.trained, [batch(1, "a")])
    hostile = [
        b"\xff\xfe",
        b"{",
        b"null",
        b"",
        b"[" * 100_000,
        b'{"group_id":"c","session":1,"seq":1,"at":1,"tokens":-5}',
        b'{"group_id":"c","session":1,"seq":1,"at":1,"sequences":1' + b"0" * 400 + b"}",
        b'{"group_id":"c","session":1,"seq":1,"at":1,"reward":1e999}',
        b'{"group_id":"c","session":1,"seq":1,"at":1,"split":7}',
        b'{"group_id":"c","session":1,"seq":1,"at":1,"reward":"much"}',
    ]
    for path in (layout.ack_log("sort3-0"), layout.trained):
        path.write_bytes(b"\n".join(hostile) + b"\n" + path.read_bytes())
    layout.dropped.write_bytes(b'{"at":1}\n{"at":1,"group_id":"b","state":"expired","reason":"stale"}\n{"at"')
    found = survey(layout, [])
    assert found.unreadable_lines == {"sort3-0.jsonl": 10, "trained.jsonl": 10, "dropped.jsonl": 1}
    assert fates(found) == {"trained": 1, "expired": 1}
    assert found.bias.undescribed == {}
    told = list(unread(found))
    assert told[0] == "not read: 10 lines of sort3-0.jsonl, damaged; their groups are missing above"
    assert "1 line of dropped.jsonl" in told[2]


def test_damage_of_the_journal_is_said(run_dir: Path) -> None:
    made = Handmade(run_dir)
    made.log(began(), [made.accept(1)])
    made.log_file(1).write_bytes(b"no log at all")
    made.acked("g1")
    found = survey(made.layout, [])
    assert found.bias.undescribed == {"lost": 1}
    assert [line for line in unread(found) if "events-00000001.rmq" in line]
    assert found.fields()["journal_damage"] == found.journal_damage


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    """A run without a journal: of its 400 groups, all that took longer than 3 s expired."""
    layout = RunLayout(run_dir)
    write_json(layout.config, validate({"broker": {"durability": "memory"}}))
    groups = [
        AckedGroup(
            group_id=f"g{number}",
            session=1,
            seq=number + 1,
            at=1.0,
            env="sort3",
            sequences=2,
            tokens=2 * (20 + number % 7),
            duration_s=float(number % 5),
            reward=number % 3 / 2,
        )
        for number in range(400)
    ]
    slow = [group for group in groups if (group.duration_s or 0) > 3]
    write_lines(layout.ack_log("sort3-0"), groups)
    write_lines(layout.trained, [batch(1, *[group.group_id for group in groups if group not in slow])])
    write_lines(
        layout.dropped,
        [DroppedGroup(at=1.0, group_id=one.group_id, state="expired", reason="stale") for one in slow],
    )
    return layout


def report(layout: RunLayout, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "report", str(layout.root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def summary_of(layout: RunLayout) -> dict[str, Any]:
    """Return the summary that `report --json` prints."""
    found: dict[str, Any] = json.loads(report(layout, "--json").stdout)["summary"]
    return found


def snapshot(layout: RunLayout) -> dict[Path, tuple[bytes, int]]:
    """Return contents and change time of every file of a run."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in layout.root.rglob("*")
        if path.is_file()
    }


def test_report_shows_a_bias_to_a_person_and_to_a_program(layout: RunLayout) -> None:
    told = report(layout)
    assert (told.returncode, told.stderr) == (0, "")
    assert "bias       shows: sort3 by duration (trained, expired)\n" in told.stdout
    assert "groups     400 accepted: 320 trained" in told.stdout
    assert "  duration    trained: BIASED (p" in told.stdout
    assert "  length      trained: no bias found" in told.stdout
    fields = json.loads(report(layout, "--json").stdout)
    assert fields["bias"]["environments"]["sort3"]["dimensions"]["duration"]["verdict"] == "biased"
    short = {"length": "none shows", "duration": "biased", "reward": "none shows"}
    summary = summary_of(layout)
    assert summary["bias"]["environments"] == {"sort3": short}
    assert fields["summary"] == summary


def test_damaged_line_costs_the_summary_but_not_the_comparison(layout: RunLayout) -> None:
    path = layout.ack_log("sort3-0")
    path.write_bytes(b"garbage\n" + path.read_bytes())
    told = report(layout)
    assert told.returncode == 1
    assert "sort3-0.jsonl, line 1" in told.stderr
    assert "not read: 1 line of sort3-0.jsonl" in told.stdout
    assert "  duration    trained: BIASED (p" in told.stdout
    fields = json.loads(report(layout, "--json").stdout)
    assert fields["summary"] is None
    assert fields["bias"]["unreadable_lines"] == {"sort3-0.jsonl": 1}


def test_damaged_lines_of_the_metrics_cost_neither_summary_nor_exit_code(layout: RunLayout) -> None:
    layout.metrics.write_bytes(b'{"t": 1.0, "kind": "pre\n{"t": 2.0}\n\xff\n{"t": 5.5}\n')
    told = report(layout)
    assert (told.returncode, told.stderr) == (0, "")
    assert "groups     400 accepted: 320 trained" in told.stdout
    assert "\nnot read   2 lines of metrics.jsonl, damaged\n" in told.stdout
    assert summary_of(layout)["metrics_lines_damaged"] == 2
    layout.metrics.unlink()
    assert "not read" not in report(layout).stdout


def test_the_report_counts_the_damaged_lines_that_the_page_counts(layout: RunLayout) -> None:
    layout.metrics.write_bytes(
        b'{"t":1.0,"kind":"latency_sample","rows":7}\n{"t":1.0,"kind":"gpu_sample","uuid":4}\n'
        b'{"t":1.0,"kind":"unknown","figures":7}\n'
    )
    assert "\nnot read   2 lines of metrics.jsonl, damaged\n" in report(layout).stdout
    assert damaged_lines(layout.metrics) == 2


def test_counts_of_a_trainer_of_ones_own_are_those_of_the_ledger(run_dir: Path) -> None:
    made = Handmade(run_dir)
    leases = made.lease([1, 2]), made.lease([3], step=2)
    groups = [made.accept(number) for number in range(1, 5)]
    settled = settles(leases[0], "g1", filtered=("g2",))
    made.log(began(), groups, [leases[0], settled, leases[1]], [Dropped(4, "expired", "stale")])
    made.dropped(DroppedGroup(at=1.0, group_id="g4", state="expired", reason="stale"))
    told = report(made.layout)
    assert "4 accepted: 1 trained, 1 filtered, 1 expired, 0 dead, 1 in flight" in told.stdout
    verdict = check(made.layout, quick=True)
    summary = summary_of(made.layout)
    assert summary["groups_accepted"] == verdict.accepted == 4
    assert summary["groups_in_flight"] == verdict.counts["queued"] + verdict.counts["leased"] == 1
    for state in ("trained", "filtered", "expired", "dead", "discarded"):
        assert summary[f"groups_{state}"] == verdict.counts[state]
    found = json.loads(report(made.layout, "--json").stdout)["bias"]["environments"]["sort3"]
    assert found["fates"] == {"trained": 1, "filtered": 1, "expired": 1, "in_flight": 1}


@pytest.mark.parametrize("logged", [(), ("g1",)])
def test_a_log_that_names_less_than_the_ledger_settled_does_not_speak(
    run_dir: Path, logged: tuple[str, ...]
) -> None:
    """Such as that of a trainer of one's own which resumed, and settles without a log: its groups were in flight."""
    made = Handmade(run_dir)
    outside = {"environment": {"sort3": {"entry": "a:B"}}, "trainer": {"enabled": False}}
    write_json(made.layout.config, validate(outside))
    lease = made.lease([1, 2])
    groups = [made.accept(number) for number in range(1, 4)]
    made.log(began(), groups, [lease, settles(lease, "g1", "g2")])
    line = SettledBatch(at=1.0, version=PolicyVersion(0, 1), trained=logged, resumed=True)
    made.layout.trained.write_bytes(msgspec.json.encode(line) + b"\n")
    assert "3 accepted: 2 trained, 0 filtered, 0 expired, 0 dead, 1 in flight" in report(made.layout).stdout
    summary = summary_of(made.layout)
    assert (summary["groups_trained"], summary["groups_in_flight"], summary["groups_lost"]) == (2, 1, 0)


def test_groups_for_evaluation_do_not_outweigh_the_log_of_a_trainer_of_ones_own(run_dir: Path) -> None:
    """The ledger settles them, too, and no trainer's log names them."""
    made = Handmade(run_dir)
    outside = {"environment": {"sort3": {"entry": "a:B"}}, "trainer": {"enabled": False}}
    write_json(made.layout.config, validate(outside))
    lease = made.lease([1, 2])
    groups = [made.accept(1), made.accept(2, "e")]
    made.log(began(), groups, [lease, settles(lease, "g1", "e")])
    answer = msgspec.structs.replace(acked("e"), split=Split.EVAL)
    made.layout.acks.mkdir(exist_ok=True)
    (made.layout.acks / "sort3-0.jsonl").write_bytes(msgspec.json.encode(answer) + b"\n")
    line = SettledBatch(at=1.0, version=PolicyVersion(0, 1), trained=("g1",))
    made.layout.trained.write_bytes(msgspec.json.encode(line) + b"\n")
    assert "1 accepted: 1 trained, 0 filtered" in report(made.layout).stdout
    summary = summary_of(made.layout)
    assert (summary["groups_trained"], summary["groups_trained_twice"]) == (1, 0)


def test_a_run_without_a_training_environment_has_no_bound_to_tell(layout: RunLayout) -> None:
    exam = {"environment": {"exam": {"entry": "a:B", "split": "eval"}}, "evaluation": {"enabled": True}}
    write_json(layout.config, validate(exam))
    assert "staleness" not in report(layout).stdout


def test_report_of_a_resumed_run_counts_its_lives(layout: RunLayout) -> None:
    layout.summary.write_text(json.dumps({"ended": "the trainer is done", "wall_s": 3.0}))
    layout.log("up").parent.mkdir()
    layout.log("up").touch()
    write_json(layout.lives, [Life(10.0, 15.5), Life(100.0, 107.0)])
    assert "ended      the trainer is done, after 12.5 s in 2 lives, 84.5 s apart\n" in report(layout).stdout
    summary = summary_of(layout)
    assert (summary["wall_s"], summary["lives"], summary["downtime_s"]) == (12.5, 2, 84.5)


def test_report_changes_nothing_in_the_run_directory(layout: RunLayout, tmp_path: Path) -> None:
    recorded = {"ended": "interrupted by SIGTERM", "wall_s": 12.5}
    layout.summary.write_text(json.dumps(recorded))
    layout.log("up").parent.mkdir()
    layout.log("up").touch()
    before, picture = snapshot(layout), tmp_path / "picture.png"
    for arguments in ((), ("--json",), ("--picture", str(picture))):
        assert report(layout, *arguments).returncode == 0
    assert snapshot(layout) == before
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = report(layout).stdout
    assert "ended      interrupted by SIGTERM, after 12.5 s\n" in told
    summary = summary_of(layout)
    assert {key: summary[key] for key in recorded} == recorded
    assert f"continue with `rolloutmq up CONFIG --run-dir {layout.root} --resume`" in told
    assert fate_of(layout).reason == "interrupted by SIGTERM"


def test_report_of_an_active_run_does_not_make_it_ended(layout: RunLayout) -> None:
    """Its file said `not yet`, and every other command took that for the reason of its end."""
    addresses = Endpoints(ingest="", serve="", events="", publish="", pid=os.getpid(), epoch=1)
    write_json(layout.endpoints, addresses)
    assert "ended      not yet, after " in report(layout).stdout
    layout.endpoints.unlink()
    assert "its broker, which was started by hand, has ended" in fate_of(layout).say(layout)


@pytest.mark.parametrize(
    "reason", ["environment.sort3: 20 rollouts in a row failed", "interrupted by SIGINT"]
)
def test_report_of_a_failed_environment_has_the_traceback_of_its_code(layout: RunLayout, reason: str) -> None:
    layout.summary.write_text(json.dumps({"ended": reason}))
    failure = UserFailure(error="ValueError: planted", report='File "a.py", line 8, in score')
    layout.failure("sort3").parent.mkdir(parents=True, exist_ok=True)
    write_json(layout.failure("sort3"), failure)
    told = report(layout).stdout
    assert f"ended      {reason}" in told
    assert (
        'last error of environment sort3: ValueError: planted\n\n    File "a.py", line 8, in score\n' in told
    )


def test_report_of_a_broker_started_by_hand_names_no_launcher(layout: RunLayout) -> None:
    addresses = Endpoints(ingest="", serve="", events="", publish="", pid=os.getpid(), epoch=1)
    write_json(layout.endpoints, addresses)
    told = report(layout).stdout
    assert "ended      not yet, after " in told
    assert "continue with" not in told
    layout.endpoints.unlink()
    told = report(layout).stdout
    assert "ended      its broker, which was started by hand, has ended\n" in told
    assert f"continue with `rolloutmq broker --run-dir {layout.root}`" in told
    spaced = RunLayout(layout.root.rename(layout.root.parent / "my run"))
    assert f"continue with `rolloutmq broker --run-dir '{spaced.root}'`" in report(spaced).stdout
    assert "up" not in told.replace("group", "")


def test_without_a_journal_the_broker_is_asked_and_its_saved_state_read(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    config = validate({"broker": {"durability": "memory"}, "run": {"dir": str(run_dir)}})
    write_json(layout.config, config)
    with running_broker(config, layout):
        with Producer.blocking(str(run_dir), env="mine", producer="p", group_size=2) as producer:
            for name in ("a", "b", "c"):
                producer.send(make_group(name), timeout_s=30.0)
        with Consumer.blocking(str(run_dir), sequences=4) as consumer:
            next(iter(consumer)).ack()
        counts = "3 accepted: 2 trained, 0 filtered, 0 expired, 0 dead, 1 in flight"
        assert counts in report(layout).stdout
    assert not layout.journal.exists()
    told = report(layout).stdout
    assert counts in told
    assert "ledger verify" not in told, "it checks journals"


def test_what_a_killed_broker_without_a_journal_had_settled_is_not_lost(run_dir: Path) -> None:
    """Its ledger is gone, and the next life counts anew."""
    layout = RunLayout(run_dir)
    config = validate(
        {
            "broker": {"durability": "memory"},
            "run": {"dir": str(run_dir)},
            "trainer": {"enabled": False},
        }
    )
    write_json(layout.config, config)
    names = iter("abcdef")
    for _ in range(2):
        with running_broker(config, layout):
            with Producer.blocking(str(run_dir), env="mine", producer="p", group_size=2) as producer:
                for _ in range(3):
                    producer.send(make_group(next(names)), timeout_s=30.0)
            with Consumer.blocking(str(run_dir), sequences=4) as consumer:
                next(iter(consumer)).ack()
        layout.saved.unlink()  # as if it had been killed
        counts = {name: count for name, count in acked_and_trained(layout).items() if count}
        assert counts == {
            "groups_accepted": counts["groups_trained"],
            "groups_trained": counts["groups_trained"],
        }
    assert counts["groups_trained"] == 4


def acked_and_trained(layout: RunLayout) -> dict[str, int]:
    assert report(layout).returncode == 0
    summary = summary_of(layout)
    assert summary["steps"] > 0
    return {name: summary[name] for name in ("groups_accepted", "groups_trained", "groups_lost")}


@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_what_a_running_broker_has_is_in_flight(run_dir: Path, durability: str) -> None:
    """Queued and leased groups are; one that was acked, and that the broker does not have, is lost."""
    layout = RunLayout(run_dir)
    config = validate({"broker": {"durability": durability}, "run": {"dir": str(run_dir)}})
    write_json(layout.config, config)
    with running_broker(config, layout):
        with Producer.blocking(str(run_dir), env="mine", producer="p", group_size=2) as producer:
            for name in "abcdef":
                producer.send(make_group(name), timeout_s=30.0)
        write_lines(layout.ack_log("p"), list(map(acked, "abcdef")))
        with Consumer.blocking(str(run_dir), sequences=4) as consumer:
            batches = iter(consumer)
            next(batches).ack()
            settled = [line for line in read_lines(layout.settled, SettledBatch) if line.trained]
            write_lines(layout.trained, settled)
            assert states_of(layout) == {"accepted": 6, "trained": 2, "in_flight": 4}
            leased = next(batches)
            assert states_of(layout) == {"accepted": 6, "trained": 2, "in_flight": 4}
            write_lines(layout.ack_log("gone-0"), [acked("g")])
            assert states_of(layout) == {"accepted": 7, "trained": 2, "in_flight": 4, "lost": 1}
            write_lines(layout.ack_log("gone-0"), [])
            leased.ack()


def test_what_is_acked_while_a_report_reads_is_in_flight(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_lines(layout.ack_log("sort3-0"), [acked("a"), msgspec.structs.replace(acked("b"), at=3.0)])
    assert fates(survey(layout, [], as_of=2.0)) == {"in_flight": 1, "lost": 1}


def states_of(layout: RunLayout) -> dict[str, int]:
    """Return the groups of a report by state, without zeros; those of its comparison agree."""
    reply = json.loads(report(layout, "--json").stdout)
    summary = reply["summary"]
    states = ("accepted", "trained", "filtered", "in_flight", "lost")
    counts = {state: summary[f"groups_{state}"] for state in states if summary[f"groups_{state}"]}
    fates = Counter(reply["bias"]["undescribed"])
    for env in reply["bias"]["environments"].values():
        fates.update(env["fates"])
    assert {state: count for state, count in fates.items() if count} == {
        state: count for state, count in counts.items() if state != "accepted"
    }
    return counts
