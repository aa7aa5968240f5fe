"""What is on file after a kill at any point, and after a change of the configuration."""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.services.curriculum.stubs import SPACE, curriculum, done

from rolloutmq.schemas.errors import ConfigError, DamagedFileError, UnusablePathError
from rolloutmq.services.curriculum.core import Curriculum, CurriculumState
from rolloutmq.services.curriculum.event_log import EventLog
from rolloutmq.services.curriculum.samplers.ordered import Uniform
from rolloutmq.services.curriculum.samplers.registry import ForeignSampler
from rolloutmq.services.curriculum.samplers.sampler import Outcome


def loaded(directory: Path, snapshot_bytes: int = 1 << 20) -> tuple[Curriculum, EventLog]:
    one = curriculum(ahead=3)
    log = EventLog(directory, one, snapshot_bytes)
    assert log.load() == []
    return one, log


def play(one: Curriculum, log: EventLog, turns: int, rng: random.Random) -> list[CurriculumState]:
    """Draw and end tasks; return the state after each event."""
    states = []
    for _ in range(turns):
        if (drawn := one.refill("l")) is not None:
            log.append(drawn)
            states.append(one.state())
        name = rng.choice(list(one.open))
        log.append(one.ended(done(name, *(rng.random() for _ in range(4)))))
        states.append(one.state())
    return states


def test_a_log_that_is_cut_anywhere_is_the_state_after_its_whole_lines(tmp_path: Path) -> None:
    one, log = loaded(tmp_path)
    states = [one.state(), *play(one, log, 12, random.Random(1))]
    snapshot, whole = (tmp_path / "e.state").read_bytes(), (tmp_path / "e.log").read_bytes()
    assert whole.count(b"\n") == len(states) - 1
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    inside = random.Random(2).sample(range(len(whole)), 100)
    for cut in sorted({0, len(whole), *inside, *ends, *(end + 1 for end in ends)}):
        (tmp_path / "e.state").write_bytes(snapshot)
        (tmp_path / "e.log").write_bytes(whole[:cut])
        again, _ = loaded(tmp_path)
        assert again.state() == states[whole[:cut].count(b"\n")]


def test_a_kill_between_snapshot_and_log_repeats_no_event(tmp_path: Path) -> None:
    one, log = loaded(tmp_path)
    play(one, log, 5, random.Random(1))
    events = (tmp_path / "e.log").read_bytes()
    loaded(tmp_path)  # writes a snapshot with all of them, and an empty log
    assert (tmp_path / "e.log").read_bytes() == b""
    (tmp_path / "e.log").write_bytes(events)
    again, _ = loaded(tmp_path)
    assert again.state() == one.state()


def test_a_long_log_becomes_a_snapshot(tmp_path: Path) -> None:
    one, log = loaded(tmp_path, snapshot_bytes=500)
    longest = 0
    for turn in range(200):
        play(one, log, 1, random.Random(turn))
        longest = max(longest, (tmp_path / "e.log").stat().st_size)
    assert longest <= 2 * (tmp_path / "e.state").stat().st_size + 500
    again, _ = loaded(tmp_path)
    assert again.state() == one.state()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.log", "e.state"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("e.state", b"\xc1", 1),
        ("e.state", b"", 1),
        ("e.log", b"no event\n", 1),
        ("e.log", b'{"event":"ended","number":1,"id":"l-9","state":"done"}\n', 1),
        ("e.log", b'{"event":"drawn","number":7,"tasks":{}}\n', 1),
        ("e.log", b'{"event":"drawn","number":1,"tasks":{"l-0":100}}\n', 1),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, line: int) -> None:
    loaded(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedFileError) as caught:
        loaded(tmp_path)
    assert caught.value.line == line


def test_a_curriculum_that_was_configured_anew_begins_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, log = loaded(tmp_path)
    play(one, log, 4, random.Random(1))
    other = curriculum(ahead=3, options={"decay": 0.5})
    anew = EventLog(tmp_path, other)
    assert sorted(anew.load()) == sorted(one.open), "for their cancellation"
    anew.begin()
    assert EventLog(tmp_path, curriculum(ahead=3, options={"decay": 0.5})).load() == []
    assert (other.figures.drawn, other.open) == (0, {})
    assert "configured anew" in caplog.text
    assert "options {'decay': 0.5} <- {}" in caplog.text or "options {} -> {'decay': 0.5}" in caplog.text


def test_tasks_of_another_configuration_are_found_again_until_the_new_one_begins(tmp_path: Path) -> None:
    one, log = loaded(tmp_path)
    play(one, log, 4, random.Random(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for options in ({"decay": 0.5}, {"decay": 0.5}, {"decay": 0.25}):
        # Each life is killed before the broker has cancelled the tasks.
        assert sorted(EventLog(tmp_path, curriculum(options=options)).load()) == sorted(one.open)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    again, _ = loaded(tmp_path)
    assert again.state() == one.state(), "the old configuration continues"


@contextmanager
def room(path: Path, nbytes: int) -> Iterator[None]:
    """Let files grow no longer than a file and some bytes; the kernel then writes what fits, as on a full disk."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + nbytes, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)


@pytest.mark.parametrize("nbytes", [0, 20])
def test_an_event_that_does_not_fit_on_the_disk_is_an_error_and_leaves_the_log_as_it_was(
    tmp_path: Path, nbytes: int
) -> None:
    one, log = loaded(tmp_path)
    play(one, log, 4, random.Random(1))
    before, written = one.state(), (tmp_path / "e.log").read_bytes()
    with (
        room(tmp_path / "e.log", nbytes),
        pytest.raises(
            UnusablePathError, match=r"state of the curriculum .*e\.log: cannot be used \(File too large"
        ),
    ):
        log.append(one.ended(done(next(iter(one.open)), 0, 1)))
    assert (tmp_path / "e.log").read_bytes() == written
    again, after = loaded(tmp_path)
    assert again.state() == before
    play(again, after, 2, random.Random(2))
    assert loaded(tmp_path)[0].state() == again.state()


def test_a_snapshot_that_does_not_fit_on_the_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    one, log = loaded(tmp_path)
    play(one, log, 4, random.Random(1))
    with room(tmp_path / "e.state", -1), pytest.raises(UnusablePathError, match=r"e\.state: cannot be used"):
        log.begin()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.log", "e.state"]
    assert loaded(tmp_path)[0].state() == one.state()


class Broken(Uniform):
    """Cannot hear the outcome of one task."""

    wrong = -1

    def update(self, outcome: Outcome) -> None:
        if outcome.index == self.wrong:
            raise KeyError(outcome.index)
        super().update(outcome)


def test_an_outcome_that_a_sampler_cannot_hear_is_never_on_file(tmp_path: Path) -> None:
    broken = Broken(SPACE)
    foreign = ForeignSampler(broken, "curriculum.e.sampler", "mine", SPACE)
    one = curriculum(ahead=3, sampler=foreign)
    log = EventLog(tmp_path, one)
    log.load()
    play(one, log, 4, random.Random(1))
    before = one.state()
    name, broken.wrong = next(iter(one.open.items()))
    with pytest.raises(ConfigError, match=r"^curriculum\.e\.sampler: mine\.update raised KeyError"):
        log.append(one.ended(done(name, 0, 1)))
    again = curriculum(ahead=3, sampler=Uniform(SPACE))
    after = EventLog(tmp_path, again)
    after.load()
    assert again.state() == before
    after.append(again.ended(done(name, 0, 1)))
    assert again.figures.outcomes == before.figures.outcomes + 1
