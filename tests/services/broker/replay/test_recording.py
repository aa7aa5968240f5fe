"""Recordings: their batches after lost leases, resumes and forgotten batches."""

import pytest
from tests.services.broker.bench import Bench, config, ids

from rolloutmq.schemas.wire.control import Reset
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Ok, Rejected
from rolloutmq.schemas.wire.requests import Commit
from rolloutmq.services.broker.journal.format.events import Accepted
from rolloutmq.services.broker.replay.recording import RecordedBatch, Transcript


def transcript(bench: Bench) -> list[RecordedBatch]:
    found = Transcript()
    for event in bench.journal.read():
        found.read(event)
    return found.batches


def recorded(bench: Bench) -> list[tuple[int, list[str]]]:
    """Step and groups of each recorded batch."""
    accepted = [event for event in bench.journal.events if isinstance(event, Accepted)]
    names = {event.order: event.header.group_id for event in accepted}
    return [(b.step, sorted(names[order] for order in b.groups)) for b in transcript(bench)]


def ready(**broker: int) -> Bench:
    bench = Bench(config(broker=dict(broker), e={"stale": "pass"}))
    bench.shadowed = False
    bench.producer().send(40)
    bench.consumer()
    return bench


def step(bench: Bench, number: int) -> tuple[int, list[str]]:
    return number, sorted(bench.train(number))


def commit(bench: Bench, number: int) -> None:
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, number)), Ok)


def test_settled_batches_are_recorded_in_their_order_and_open_ones_are_not() -> None:
    bench = ready()
    trained = [step(bench, 0), step(bench, 1)]
    batch = bench.batch(2)
    bench.settle(batch, no_signal=True)
    trained += [(2, sorted(ids(batch))), step(bench, 2)]
    bench.batch(3)
    assert recorded(bench) == trained


def test_a_lost_lease_is_recorded_when_it_comes_again() -> None:
    bench = ready()
    trained = [step(bench, 0)]
    bench.batch(1)
    bench.consumer()
    trained.append(step(bench, 1))
    assert recorded(bench) == trained


@pytest.mark.parametrize("committed", [0, 2])
def test_what_a_trainer_went_back_behind_is_recorded_once(committed: int) -> None:
    bench = ready()
    trained = [step(bench, number) for number in range(5)]
    commit(bench, committed)
    bench.consumer(resume=PolicyVersion(0, 2))
    assert recorded(bench) == trained[:2]
    trained[2:] = [step(bench, number) for number in range(2, 7)]
    assert recorded(bench) == trained


def test_what_is_committed_or_let_go_never_comes_again() -> None:
    """A trainer that resumes before its own commit gets only retained batches; the others stay trained."""
    bench = ready()
    trained = [step(bench, number) for number in range(4)]
    commit(bench, 3)
    bench.consumer(resume=PolicyVersion(0, 0))
    trained[3:] = [step(bench, number) for number in (0, 1)]
    assert recorded(bench) == trained
    small = ready(retain_bytes=1)
    trained = [step(small, number) for number in range(3)]
    small.consumer(resume=PolicyVersion(0, 0))
    trained.append(step(small, 0))
    assert recorded(small) == trained


def test_a_batch_of_which_nothing_was_used_is_recorded() -> None:
    bench = ready()
    batch = bench.batch(0)
    rejected = tuple(Rejected(group_id=name, reason="bad") for name in ids(batch))
    bench.settle(batch, trained=(), rejected=rejected, version=PolicyVersion())
    bench.consumer(resume=PolicyVersion(0, 0))
    assert recorded(bench) == [(0, sorted(ids(batch)))]


def test_a_reset_begins_a_new_record() -> None:
    bench = ready()
    step(bench, 0)
    bench.ask(Reset(reason="test"), Ok)
    bench.producer().send(4)
    bench.consumer()
    again = step(bench, 0)
    assert recorded(bench) == [again]
