"""A session removes what ended sessions left in shared memory, and nothing of the living."""

from pathlib import Path

from tests.house import shared_memory
from tests.services.inference.vllm.support.child import child

from rolloutmq.bus.shm.segment_file import SegmentOwner

OWNER = """
import os, sys
from rolloutmq.bus.shm import segment_file
segment = segment_file.create("weights", 4096)
print(segment.path, *segment.owner(), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def told(line: str) -> tuple[Path, SegmentOwner]:
    path, *owner = line.split()
    return Path(path), SegmentOwner(*map(int, owner))


def test_only_segments_of_the_dead_of_ended_sessions_are_removed(tmp_path: Path) -> None:
    with child(OWNER) as dead, child(OWNER) as living, child(OWNER) as stranger:
        gone, session = told(dead.line())
        kept, survivor = told(living.line())
        foreign, other = told(stranger.line())
        record = tmp_path / "-".join(map(str, session))
        record.write_text("".join("{} {} {}\n".format(*owner) for owner in (session, survivor)))
        assert shared_memory.sweep(tmp_path) == []  # the session lives
        for one in (dead, stranger):
            one.order()
            assert one.ended() == 0
        try:
            assert shared_memory.sweep(tmp_path) == [gone]
            assert kept.exists()
            assert foreign.exists()
            assert record.exists(), "one of its processes lives"
            living.order()
            assert living.ended() == 0
            assert shared_memory.sweep(tmp_path) == [kept]
            assert not record.exists()
            assert foreign.exists()
        finally:
            shared_memory.remove({session, survivor, other})
    assert not foreign.exists()


def test_this_session_has_a_record_of_its_children() -> None:
    with child(OWNER) as owner:
        path, who = told(owner.line())
        relatives = shared_memory.family()
        assert who in relatives.look()
        assert "{} {} {}".format(*who) in relatives.record.read_text().splitlines()
        assert path.name in shared_memory.segments()
        owner.order()
        assert owner.ended() == 0
    assert shared_memory.remove({who}) == [path]
