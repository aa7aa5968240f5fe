"""Suspects in a window: the group that kills its trainers ends alone, whatever else the trainer holds."""

import pytest
from tests.services.broker.bench import Bench, config, ids
from tests.services.broker.requests.test_windows import Trainer, places

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, Ok
from rolloutmq.schemas.wire.requests import Release

KILLS = ("again", "resumed", "silent", "silent, resumed")


class Lives:
    """One trainer after another; each is killed in the same way."""

    def __init__(self, how: str, **given: int) -> None:
        self.how, self.given = how, given
        self.bench = Bench(config(a={"stale": "pass"}, b={"stale": "pass"}))
        self.trainer = Trainer(self.bench, **given)
        self.kills = 0

    def kill(self) -> None:
        """End the trainer's life, and begin the next."""
        self.kills += 1
        if "silent" in self.how:
            self.bench.tick(self.bench.settings.broker.silence_s + 1)
        resume = PolicyVersion(0, 0) if "resumed" in self.how else None
        step = self.trainer.step if resume is None else 0
        self.trainer = Trainer(self.bench, resume=resume, **self.given)
        self.trainer.step = step

    def pull(self, *deadly: str) -> list[str]:
        """Pull all there is; a deadly group ends the life."""
        taken: list[str] = []
        while isinstance(got := self.trainer.pull(), Batch):
            taken += ids(got)
            if set(deadly) & set(ids(got)):
                self.kill()
                return []
        return taken

    @property
    def dead(self) -> list[str]:
        return [record.group_id for record in self.bench.dropped]


@pytest.fixture(params=KILLS)
def lives(request: pytest.FixtureRequest) -> Lives:
    return Lives(request.param)


def test_who_holds_many_suspects_loses_none_of_them(lives: Lives) -> None:
    """They may be what one step needs, and come again to the last one, in more leases than a window has."""
    sent = lives.bench.producer(env="a").send(12)
    for _ in range(7):
        assert sorted(lives.pull()) == sorted(sent)
        assert len(lives.bench.core._state.leases) in {3, 12}
        lives.kill()
    assert sorted(lives.pull()) == sorted(sent)
    assert lives.dead == []
    assert lives.trainer.settle(*sent).lost == ()


@pytest.mark.parametrize("place", range(6))
def test_the_deadly_one_of_many_suspects_ends_alone(lives: Lives, place: int) -> None:
    """It kills at its delivery, and is found with one kill more than a batch of its own would take."""
    sent = lives.bench.producer(env="a").send(6)
    while not lives.dead:
        lives.pull(sent[place])
        assert lives.kills <= 4
    healthy = [name for name in sent if name != sent[place]]
    assert lives.dead == [sent[place]]
    assert sorted(lives.pull()) == sorted(healthy)
    assert lives.trainer.settle(*healthy).lost == ()
    assert places(lives.bench) == {"trained": 5, "dead": 1}


def test_two_deadly_groups_end_one_after_the_other(lives: Lives) -> None:
    sent = lives.bench.producer(env="a").send(5) + lives.bench.producer("q", "b").send(5)
    while len(lives.dead) < 2:
        lives.pull(sent[3], sent[8])
        assert lives.kills <= 8
    assert set(lives.dead) == {sent[3], sent[8]}
    assert len(lives.pull()) == 8


def test_a_deadly_group_ends_though_settled_steps_come_again(lives: Lives) -> None:
    """A resumed trainer gets its settled steps again in their order. What may kill it comes before them."""
    first = lives.bench.producer(env="a").send(4)
    assert lives.pull() == first
    lives.trainer.settle(first[0], first[1])
    lives.trainer.settle(first[2])
    later = lives.bench.producer("q", "b").send(3)
    while not lives.dead:
        lives.pull(later[1])
        assert lives.kills <= 4
    assert lives.dead == [later[1]]
    rest = {first[3], later[0], later[2]}
    taken = lives.pull()
    if "resumed" in lives.how:
        assert [name for name in taken if name not in rest] == first[:3]
    assert rest <= set(taken)


def test_a_deadly_group_ends_though_each_life_settles_a_step(lives: Lives) -> None:
    sent = lives.bench.producer(env="a").send(6)
    while not lives.dead:
        held: list[str] = []
        while isinstance(got := lives.trainer.pull(groups=2), Batch):
            held += ids(got)
            if sent[5] in held:
                lives.kill()
                break
            if len(held) == 2:
                lives.trainer.settle(held[0])
        assert lives.kills <= 4
    assert lives.dead == [sent[5]]


def test_an_accused_group_that_is_too_old_lets_no_new_one_before_a_settled_step() -> None:
    bench = Bench(config(a={"max_staleness": 1}))
    peer = bench.producer(env="a")
    first, second, third, *_ = peer.send(5, step=0)
    for _ in range(2):
        assert len(Trainer(bench, groups=5).take()) == 5
    trainer = Trainer(bench, groups=5)
    for _ in range(5):
        trainer.take()
    for name in (first, second, third):
        trainer.settle(name)
    bench.tick(bench.settings.broker.silence_s + 1)
    trainer = Trainer(bench, resume=PolicyVersion(0, 2))
    (new,) = peer.send(1, step=2)
    assert trainer.take() == (third,)
    assert trainer.take() == (new,)
    assert places(bench) == {"leased": 2, "committed": 2}
    assert len(bench.dropped) == 2, "both are too old"


def test_a_suspect_that_is_given_back_is_not_at_fault() -> None:
    lives = Lives("again")
    (only,) = lives.bench.producer(env="a").send(1)
    for _ in range(2):
        assert lives.pull() == [only]
        lives.kill()
    for _ in range(3):
        assert lives.pull() == [only]
        lives.bench.ask(Release(consumer="c", reason="left"), Ok)
    assert lives.pull() == [only]
    lives.kill()
    assert lives.dead == [only]


def test_a_trainer_without_progress_loses_its_whole_window_at_once() -> None:
    """Its leases began one after the other. If they ended so too, the last would seem to have been alone."""
    bench = Bench(config(a={"stale": "pass"}))
    trainer = Trainer(bench, groups=1)
    sent = bench.producer(env="a").send(3)
    for _ in range(5):
        for name in sent:
            assert trainer.take() is not None, name
            bench.send_beat()
            bench.tick(5.0)
        assert places(bench) == {"leased": 3}
        while places(bench) == {"leased": 3}:
            bench.send_beat()
            bench.tick(5.0)
        assert places(bench) == {"queued": 3}
