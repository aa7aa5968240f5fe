"""The comparison over the files of a run: what is described where, what is damaged, and what nobody knows."""

from pathlib import Path

import pytest
from tests.services.broker.journal.handmade import Handmade, batch, began, item, ledger, write_lines

from rolloutmq.launch.bias import Survey, survey, unread
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import AckedGroup, DroppedGroup
from rolloutmq.services.broker.journal.facts import Numbers


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
    assert told[0] == "not read: 10 lines of sort3-0.jsonl, damaged; what they say is missing above"
    assert "1 line of dropped.jsonl" in told[2]


def test_damage_of_the_journal_is_said(run_dir: Path) -> None:
    made = Handmade(run_dir)
    made.log(began(), [made.accept(1)])
    made.log_file(1).write_bytes(b"no log at all")
    made.acked("g1")
    found = survey(made.layout, [])
    assert found.bias.undescribed == {"lost": 1}
    assert [line for line in unread(found) if "facts-00000001.rmq" in line]
    assert found.fields()["journal_damage"] == found.journal_damage
