"""The book of lives: what is told once, what is told late, and what is given up."""

from typing import Any

from rolloutmq.services.orchestrator.cluster.lives import KILL_S, LifeBook
from rolloutmq.services.orchestrator.cluster.messages import HostState, LifeState


def told(
    over: bool = False, output: bytes = b"", offset: int = 0, more: bool = False, **state: Any
) -> HostState:
    found = LifeState(life="a", name="e-0", over=over, **state)
    return HostState(state=found, offset=offset, output=output, more=more)


def begun(timeout_s: float = 10.0) -> LifeBook:
    book = LifeBook(timeout_s)
    book.begin("a", "e-0", "e", 0.0)
    return book


def test_a_state_is_told_once() -> None:
    book = begun()
    news = book.answer("a", told(pid=7, host="h"), 0.0)
    assert news is not None
    assert (news.pid, news.host) == (7, "h")
    assert book.answer("a", told(pid=7, host="h"), 0.0) is None
    assert book.report().lives == (news,)


def test_the_end_is_told_after_the_last_output() -> None:
    """The last line of the log is the reason of a crash."""
    book = begun()
    assert book.answer("a", told(over=True, code=1, output=b"err", more=True), 0.0) is None
    assert book.answer("a", told(over=True, code=1, output=b"or", offset=3), 0.0) is None
    life = book.get("a")
    assert life is not None
    assert life.acked == 5
    news = book.answer("a", told(over=True, code=1, offset=5), 0.0)
    assert news is not None
    assert news.code == 1
    assert book.living() == []


def test_a_life_without_an_answer_is_given_up_in_time() -> None:
    book = begun(timeout_s=10.0)
    assert book.unplaced(10.0) == []
    assert [one.state.name for one in book.unplaced(10.1)] == ["e-0"]
    news = book.end("a", "needs 4 CPU")
    assert news is not None
    assert (news.over, news.code, news.why) == (True, None, "needs 4 CPU")
    assert book.unplaced(20.0) == []
    assert book.end("a", "again") is None


def test_a_host_that_sets_up_slowly_is_no_missing_one() -> None:
    book = begun(timeout_s=10.0)
    book.answer("a", told(waits_for="the run"), 0.0)
    assert book.unplaced(100.0) == []


def test_a_kill_that_is_not_carried_out_ends_the_life() -> None:
    book = begun()
    book.answer("a", told(pid=7), 0.0)
    book.killed("a", 5.0)
    book.killed("a", 9.0)
    assert book.unkillable(5.0 + KILL_S) == []
    assert len(book.unkillable(5.1 + KILL_S)) == 1


def test_a_host_that_answers_after_a_kill_is_left_to_send_the_groups() -> None:
    book = begun()
    book.killed("a", 5.0)
    book.answer("a", told(waits_for="the run"), 60.0)
    assert book.unkillable(60.0 + KILL_S) == []
    assert len(book.unkillable(60.1 + KILL_S)) == 1


def test_a_released_life_is_forgotten() -> None:
    book = begun()
    assert book.release("a")
    assert not book.release("a")
    assert "a" not in book
    assert book.answer("a", told(pid=7), 0.0) is None


def test_a_found_life_asks_for_what_its_host_still_holds() -> None:
    book = LifeBook(10.0)
    book.find("a", "e-0", "e", 0.0)
    life = book.get("a")
    assert life is not None
    assert life.acked == -1
    assert book.living() == ["a"]
