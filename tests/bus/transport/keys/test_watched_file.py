"""A list that others replace is read again once it has changed, and a damaged one leaves that of before."""

from pathlib import Path

import pytest

from rolloutmq.bus.transport.keys.watched_file import LOOK_S, WatchedFile
from rolloutmq.schemas.errors import ConfigError


class Numbers:
    """A file with a number."""

    def __init__(self, path: Path) -> None:
        self.path, self.reads = path, 0

    def write(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    def read(self) -> int:
        self.reads += 1
        try:
            return int(self.path.read_text())
        except ValueError:
            raise ConfigError("number", f"is damaged (read {self.reads})") from None


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    made = Numbers(tmp_path / "number")
    made.write("1")
    return made


def test_it_is_read_again_once_it_has_changed(numbers: Numbers) -> None:
    watched = WatchedFile(numbers.path, numbers.read)
    assert not watched.look(1.0)
    assert (watched.value, numbers.reads) == (1, 1)
    numbers.write("2")
    assert not watched.look(1.0 + LOOK_S / 2), "not looked at yet"
    assert watched.due == 1.0 + LOOK_S
    assert watched.look(1.0 + LOOK_S)
    assert (watched.value, numbers.reads) == (2, 2)


def test_a_damaged_or_missing_one_leaves_that_of_before(
    numbers: Numbers, caplog: pytest.LogCaptureFixture
) -> None:
    watched = WatchedFile(numbers.path, numbers.read)
    numbers.write("{")
    assert not watched.look(1.0)
    assert "keys not read, those of before stay error=number: is damaged" in caplog.text
    assert "number: is damaged" in watched.problem
    numbers.write("3")
    assert watched.look(2.0)
    assert (watched.value, watched.problem) == (3, "")


def test_one_that_comes_back_as_it_was_is_no_problem_any_more(numbers: Numbers) -> None:
    watched = WatchedFile(numbers.path, numbers.read)
    aside = numbers.path.with_suffix(".aside")
    numbers.path.rename(aside)
    numbers.path.write_text("{")
    assert not watched.look(1.0)
    assert watched.problem
    aside.rename(numbers.path)
    assert not watched.look(2.0)
    assert watched.problem == ""


def test_a_change_of_the_mode_alone_is_seen(numbers: Numbers) -> None:
    watched = WatchedFile(numbers.path, numbers.read)
    numbers.path.chmod(0o644 if numbers.path.stat().st_mode & 0o777 != 0o644 else 0o600)
    assert watched.look(1.0)


def test_one_that_cannot_be_read_at_the_start_is_refused(numbers: Numbers) -> None:
    numbers.write("{")
    with pytest.raises(ConfigError, match="number: is damaged"):
        WatchedFile(numbers.path, numbers.read)
