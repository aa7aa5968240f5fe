"""What may have happened when a gateway was killed is known to its next life, and nothing else is."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutmq.services.gateway import in_doubt
from rolloutmq.services.gateway.in_doubt import LASTS_S, InDoubt

HERE = asyncio.Event()
"""Of a client that waits for its answer."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "doubts.log"


@pytest.fixture
def one(path: Path) -> Iterator[InDoubt]:
    made = InDoubt(path, 0.0)
    yield made
    made.close()


def again(path: Path, now: float = 0.0) -> InDoubt:
    """Return what the next life knows, though nothing was closed."""
    made = InDoubt(path, now)
    made.close()
    return made


async def test_the_same_bytes_are_another_post_once_the_first_is_answered(one: InDoubt) -> None:
    first = await one.begin(b"body", 2, HERE, 0.0)
    one.end(first)
    second = await one.begin(b"body", 2, HERE, 0.0)
    assert len({*first.ids, *second.ids}) == 4


async def test_the_same_bytes_at_the_same_time_are_two_posts(one: InDoubt) -> None:
    first, second = [await one.begin(b"body", 1, HERE, 0.0) for _ in range(2)]
    assert first.ids != second.ids


async def test_the_same_bytes_after_no_answer_are_the_same_post(one: InDoubt) -> None:
    first = await one.begin(b"body", 2, HERE, 0.0)
    one.leave(first)
    other = await one.begin(b"another", 2, HERE, 0.0)
    assert other.ids != first.ids
    assert (await one.begin(b"body", 2, HERE, 0.0)).ids == first.ids


async def test_who_comes_again_waits_for_what_was_begun_for_a_client_that_is_gone(one: InDoubt) -> None:
    gone = asyncio.Event()
    first = await one.begin(b"body", 1, gone, 0.0)
    gone.set()
    coming = asyncio.create_task(one.begin(b"body", 1, HERE, 0.0))
    await asyncio.sleep(0)
    assert not coming.done()
    one.came(first.ids)
    one.leave(first)
    second = await coming
    assert second is first
    assert second.came == {*second.ids}


async def test_who_comes_again_after_a_refusal_is_new(one: InDoubt) -> None:
    gone = asyncio.Event()
    first = await one.begin(b"body", 1, gone, 0.0)
    gone.set()
    coming = asyncio.create_task(one.begin(b"body", 1, HERE, 0.0))
    await asyncio.sleep(0)
    one.end(first)
    assert (await coming).ids != first.ids


async def test_the_next_life_knows_what_is_in_doubt_and_what_came_of_it(one: InDoubt, path: Path) -> None:
    answered = await one.begin(b"answered", 1, HERE, 0.0)
    one.end(answered)
    open_ = await one.begin(b"open", 3, HERE, 0.0)
    one.came(open_.ids[:1])
    one.came(["somebody else's"])
    known = again(path)
    assert len(known) == 1
    found = await known.begin(b"open", 3, HERE, 0.0)
    assert (found.ids, found.came) == (open_.ids, {open_.ids[0]})


async def test_a_batch_that_went_is_known(one: InDoubt, path: Path) -> None:
    post = await one.begin(b"body", 1, HERE, 0.0)
    one.hand_out(["y"])
    one.hand_out([*post.ids, "x"])
    assert post.came == {*post.ids}
    one.settled(["y"])
    for _ in range(2):
        known = again(path)
        assert [name in known.went for name in ("y", "x", *post.ids)] == [False, True, True]


async def test_what_went_before_a_reset_is_forgotten(one: InDoubt, path: Path) -> None:
    one.hand_out(["x", "y"])
    one.forget_batches()
    assert not any(name in again(path).went for name in ("x", "y"))


async def test_two_requests_with_the_bytes_of_one_post_are_one_post_and_another(one: InDoubt) -> None:
    gone = asyncio.Event()
    first = await one.begin(b"body", 1, gone, 0.0)
    gone.set()
    coming = [asyncio.create_task(one.begin(b"body", 1, HERE, 0.0)) for _ in range(2)]
    await asyncio.sleep(0)
    one.leave(first)
    done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
    (again,) = (task.result() for task in done)
    assert again.ids == first.ids
    one.end(again)
    both = [await task for task in coming]
    assert len({post.ids for post in both}) == 2


async def test_a_full_disk_stops_nobody(one: InDoubt, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as now:
        now.setattr(os, "write", full)
        post = await one.begin(b"body", 1, HERE, 0.0)
        one.hand_out(post.ids)
        one.end(post)
    assert post.ids[0] in one.went


@pytest.mark.parametrize(
    "end", ["begun half a line", "ended nobody\n", "\x00\n", "came\n", "what is that?\n", "\n"]
)
async def test_a_damaged_end_is_passed_over(one: InDoubt, path: Path, end: str) -> None:
    post = await one.begin(b"body", 1, HERE, 0.0)
    with path.open("a") as file:
        file.write(end)
    assert (await again(path).begin(b"body", 1, HERE, 0.0)).ids == post.ids


async def test_doubts_are_forgotten_in_the_end(one: InDoubt, path: Path) -> None:
    busy, left = [await one.begin(body, 1, HERE, 0.0) for body in (b"busy", b"left")]
    one.leave(left)
    one.forget_old(LASTS_S)
    assert len(one) == 2
    one.forget_old(LASTS_S + 1.0)
    assert len(one) == 1
    assert busy.busy.locked()
    assert len(again(path)) == 1


async def test_there_are_only_so_many(one: InDoubt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_doubt, "MOST", 10)
    posts = []
    for number in range(30):
        posts.append(await one.begin(b"%d" % number, 1, HERE, 0.0))
        one.leave(posts[-1])
    assert len(one) == 10
    assert (await one.begin(b"29", 1, HERE, 0.0)).ids == posts[-1].ids
    assert (await one.begin(b"0", 1, HERE, 0.0)).ids != posts[0].ids


async def test_the_file_stays_short(one: InDoubt, path: Path) -> None:
    open_ = await one.begin(b"open", 1, HERE, 0.0)
    for _ in range(10_000):
        one.end(await one.begin(b"body", 1, HERE, 0.0))
    assert len(path.read_text().splitlines()) <= in_doubt.LEAST_LINES + 1
    assert (await again(path).begin(b"open", 1, HERE, 0.0)).ids == open_.ids


async def test_what_is_answered_after_the_end_stays_in_doubt(one: InDoubt, path: Path) -> None:
    post = await one.begin(b"body", 1, HERE, 0.0)
    one.close()
    one.end(post)
    assert len(again(path)) == 1


@pytest.mark.parametrize(
    "lines",
    [
        "begun n 626f6479 a a\nended n\n",
        "begun n 626f6479 a b\nbegun n 626f6479 a b\nended n\n",
        "begun n 626f6479 a b\nbegun m 626f6479 b c\nended n\nended m\n",
        "begun n 626f6479 a b c\n",
        "begun n 626f6479\n",
    ],
)
async def test_lines_that_contradict_each_other_harm_nobody(path: Path, lines: str) -> None:
    path.write_text(lines)
    made = InDoubt(path, 0.0)
    async with asyncio.timeout(10.0):
        post = await made.begin(b"body", 2, HERE, 0.0)
    assert len(post.ids) == 2
    made.came(post.ids)
    made.end(post)
    made.forget_old(10 * LASTS_S)
    assert len(made) == 0
    made.close()
