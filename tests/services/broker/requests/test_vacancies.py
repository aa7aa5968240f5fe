"""Environments that come and go: the vacant ones are forgotten, also by a restart, and the others are not."""

from pathlib import Path
from typing import Any

import pytest
from tests.services.broker.bench import TABLE, Bench, config
from tests.services.broker.journal.test_verify_core import JournaledBench

from rolloutmq.schemas.wire.control import LatestExample, LatestExampleReply
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.replies import Ok, Registered
from rolloutmq.schemas.wire.requests import DeclareTables, Goodbye, RegisterProducer, Sync
from rolloutmq.services.broker.journal.inspect.explain import group_histories
from rolloutmq.services.broker.requests import vacancies

SILENCE_S = 5.0
LIMIT = 8
KEPT = 2


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits."""
    monkeypatch.setattr(vacancies, "LANES_LIMIT", LIMIT)
    monkeypatch.setattr(vacancies, "VACANT_KEPT", KEPT)


def bench_of(**environments: Any) -> Bench:
    return Bench(config(broker={"silence_s": SILENCE_S}, **environments))


def envs(bench: Bench) -> list[str]:
    return [lane.env for lane in bench.pressure().lanes]


def visit(bench: Bench, number: int, groups: int = 0) -> None:
    """Be an environment that registers under a new name, sends groups, and leaves."""
    peer = bench.producer(f"p-{number}", f"e-{number}")
    peer.send(groups)
    bench.ask(Goodbye(producer=peer.name, session=peer.session, produced=groups), Ok)


def vacate(bench: Bench) -> None:
    """Let enough time pass for vacant environments to be forgotten."""
    for _ in range(int(SILENCE_S) + 2):
        bench.tick(1.0)


def test_a_run_may_have_any_number_of_environments_one_after_the_other() -> None:
    bench = bench_of()
    validate, bench.core.validate = bench.core.validate, lambda: None  # type: ignore[method-assign]
    for number in range(1100):
        visit(bench, number)
        bench.tick(1.0)
    validate()
    assert "e-1099" in envs(bench)
    assert len(envs(bench)) < 100
    bench.compare(bench.reborn())


@pytest.mark.usefixtures("small")
def test_the_newest_vacant_ones_stay_and_a_restart_agrees() -> None:
    bench = bench_of()
    for number in range(6):
        visit(bench, number)
        bench.tick(1.0)
    vacate(bench)
    assert envs(bench) == ["e-4", "e-5"]
    bench.compare(bench.reborn())
    bench.restart()
    assert envs(bench) == ["e-4", "e-5"]
    vacate(bench)
    assert envs(bench) == ["e-4", "e-5"]


@pytest.mark.usefixtures("small")
def test_whoever_holds_groups_or_is_configured_stays() -> None:
    bench = bench_of(mine={})
    bench.producer("p", "mine")
    bench.consumer()
    for number in range(3):
        visit(bench, number, groups=2)
    bench.train(0)  # kept for a checkpoint
    bench.batch(1)  # leased
    for number in range(3, 7):
        visit(bench, number)
    vacate(bench)
    assert envs(bench) == ["mine", "e-0", "e-1", "e-2", "e-5", "e-6"]
    bench.consumer(resume=PolicyVersion())
    assert len(bench.batch(0).groups) == 2
    bench.compare(bench.reborn())


@pytest.mark.usefixtures("small")
def test_only_environments_in_use_count_towards_the_limit() -> None:
    bench = bench_of()
    for number in range(LIMIT):
        visit(bench, number)
    assert bench.pressure().free_environments == LIMIT
    peers = [bench.producer(f"live-{number}", f"live-{number}") for number in range(LIMIT)]
    assert envs(bench) == [peer.env for peer in peers]
    assert bench.pressure().free_environments == 0
    assert bench.refused(RegisterProducer(producer="more", env="more")) is ErrorCode.LIMIT
    bench.producer("second", peers[0].env)
    bench.ask(Goodbye(producer=peers[1].name, session=peers[1].session), Ok)
    assert bench.pressure().free_environments == 1
    bench.producer("more", "more")
    assert peers[1].env not in envs(bench)
    bench.compare(bench.reborn())


@pytest.mark.usefixtures("small")
def test_a_producer_that_was_silent_for_long_comes_back_to_a_new_session() -> None:
    bench = bench_of()
    peer = bench.producer("old", "old")
    head = peer.next()
    peer.deliver(head)
    bench.consumer()
    bench.settle(bench.batch(0, 4))
    bench.core.forget_unclaimed()
    vacate(bench)
    for number in range(KEPT):
        visit(bench, number)
    vacate(bench)
    assert "old" not in envs(bench)
    assert bench.refused(Sync(producer="old", session=peer.session)) is ErrorCode.UNKNOWN
    asked = RegisterProducer(producer="old", env="old", resume_session=peer.session, begun=1)
    again = bench.ask(asked, Registered).ack
    assert again.session > peer.session
    bench.ask(DeclareTables(producer="old", session=again.session, tables=(TABLE,)), Ok)
    peer.deliver(head, session=again.session)
    assert bench.status().rejected_by_reason == {"duplicate": 1}
    assert bench.pressure().ledger.accepted == 1


@pytest.mark.usefixtures("small")
def test_groups_that_producers_never_sent_stay_in_the_ledger() -> None:
    bench = bench_of()
    peer = bench.producer("lost", "lost")
    bench.ask(Goodbye(producer="lost", session=peer.session, produced=3), Ok)
    assert bench.pressure().ledger.lost_before_accept == 3
    for number in range(KEPT):
        visit(bench, number)
    vacate(bench)
    assert "lost" not in envs(bench)
    assert bench.pressure().ledger.lost_before_accept == 3


@pytest.mark.usefixtures("small")
def test_the_newest_group_of_a_forgotten_environment_is_let_go() -> None:
    bench = bench_of()
    bench.consumer()
    for number in range(4):
        visit(bench, number, groups=2)
        bench.train(number)
    bench.core.forget_unclaimed()
    vacate(bench)
    assert bench.ask(LatestExample(env="e-0"), LatestExampleReply).header is None
    assert bench.ask(LatestExample(env="e-3"), LatestExampleReply).header is not None


@pytest.mark.usefixtures("small")
def test_the_journal_verifies_and_explains_groups_of_forgotten_environments(tmp_path: Path) -> None:
    bench = JournaledBench(tmp_path)
    try:
        bench.consumer()
        names = []
        for number in range(6):
            peer = bench.producer(f"p-{number}", f"e-{number}")
            names += peer.send(2, step=number)
            bench.train(number)
            bench.ask(Goodbye(producer=peer.name, session=peer.session, produced=2), Ok)
        bench.core.forget_unclaimed()
        vacate(bench)
        assert [env for env in envs(bench) if env.startswith("e-")] == ["e-4", "e-5"]
        bench.restart()
        assert [env for env in envs(bench) if env.startswith("e-")] == ["e-4", "e-5"]
        bench.catch_up()
        verdict = bench.verify(*names)
        assert (verdict.problems, verdict.accepted) == ([], len(names))
        (story,) = group_histories(tmp_path / "journal", names[0])
        assert (story.accepted.env, story.moments[0].event) == ("e-0", "accepted")
    finally:
        bench.disk.close()
