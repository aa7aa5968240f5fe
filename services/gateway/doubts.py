"""What may have happened when this process was killed: posts that may have been answered, a batch that went.

A client whose connection breaks cannot tell whether its groups came, and sends the same bytes again. So a post is
written down with the ids of its groups before these go to the broker, and struck out when its answer is on its way.
The same bytes, while the first are in doubt, get the same ids: the broker knows those that it still has, and what was
handed out to the trainer is known here. Without doubt the same bytes are another group, as ever.

The same is so with a trainer's batch: it is settled at the broker a moment after its last byte went, and who is killed
in that moment would hand its groups out again, perhaps with others. So the groups of a batch are written down in the
very moment it went, and struck out when they are settled.

The file outlives this process, not a loss of power: it is not synced, for every post would wait for that. While the
disk is full nothing is written down, and what is taken is delivered all the same.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

LASTS_S: Final = 1200.0
"""Clients give a post up long before: three attempts of at most 300 s."""
DIGEST_BYTES: Final = 16
ID_BYTES: Final = 12
MOST: Final = 1 << 16
"""Posts in doubt at once; of more, the oldest is forgotten."""
CLOSED: Final = -1
LEAST_LINES: Final = 4096
"""The file is written anew when it has so many lines, and most of them say what is over."""
BEGUN, ENDED, CAME, WENT, SETTLED = "begun", "ended", "came", "went", "settled"


@dataclass(slots=True, eq=False)
class Post:
    """The groups of one body.

    Attributes:
        ids: Of its groups, in order.
        came: Those of them that the broker is known to have had.
        busy: Free when no request works on it.
        gone: Set when the client of that request is gone.
    """

    number: str
    digest: str
    ids: tuple[str, ...]
    at: float
    gone: asyncio.Event
    came: set[str] = field(default_factory=set)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


def digest_of(body: bytes) -> bytes:
    """Return what tells a body, inflated, from others. Takes milliseconds for megabytes."""
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


class Doubts:
    """The posts of one gateway that are not known to be answered.

    Args:
        path: Where they are written down; made if it is not there.
        now: Monotonic.
    """

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        self._posts: dict[str, Post] = {}
        self._alike: dict[str, list[Post]] = {}
        self._of_group: dict[str, Post] = {}
        self._went: dict[str, None] = {}
        self._file = CLOSED
        self._lines = 0
        self._load(now)
        try:
            self._rewrite()
        except OSError as error:
            logger.error("what is in doubt cannot be written down path=%s error=%s", path, error)

    def __len__(self) -> int:
        return len(self._posts)

    def close(self) -> None:
        """Close the file; what is answered from now on stays in doubt."""
        if self._file != CLOSED:
            os.close(self._file)
        self._file = CLOSED

    async def begin(self, digest: bytes, groups: int, gone: asyncio.Event, now: float) -> Post:
        """Return the post that this body is: one that is in doubt, or a new one. `end` or `leave` it.

        Args:
            digest: Of its body; see `digest_of`.
            groups: How many it has.
            gone: Set when its client is gone.
            now: Monotonic.
        """
        alike = digest.hex()
        while (post := await self._free(alike)) is not None:
            await post.busy.acquire()
            if post.number in self._posts:
                break
            post.busy.release()  # another request with these bytes went first and ended it
        if post is None:
            ids = tuple(secrets.token_hex(ID_BYTES) for _ in range(groups))
            post = Post(secrets.token_hex(ID_BYTES), alike, ids, now, gone)
            await post.busy.acquire()
            self._make_room()
            self._add(post)
            self._write(BEGUN, post.number, alike, *ids)
        post.gone, post.at = gone, now
        return post

    def end(self, post: Post) -> None:
        """Its answer is on its way, or it was refused: there is no doubt any more."""
        self._drop(post)
        self._write(ENDED, post.number)
        post.busy.release()

    def leave(self, post: Post) -> None:
        """Nobody can tell whether the client got an answer."""
        post.busy.release()

    def came(self, ids: Iterable[str]) -> None:
        """Note groups that need not be sent again: the broker has them, or the trainer."""
        for one in ids:
            post = self._of_group.get(one)
            if post is not None and one not in post.came:
                post.came.add(one)
                self._write(CAME, one)

    def hand_out(self, ids: Iterable[str]) -> None:
        """Note the groups of a batch of which the last byte is on its way to the trainer."""
        went = tuple(ids)
        self._went.update(dict.fromkeys(went))
        while len(self._went) > MOST:
            del self._went[next(iter(self._went))]
        self._write(WENT, *went)
        self.came(went)

    @property
    def went(self) -> Container[str]:
        """The groups that the trainer got and that are not settled."""
        return self._went

    def settled(self, ids: Iterable[str]) -> None:
        """Note that groups will not come again."""
        struck = tuple(ids)
        for one in struck:
            self._went.pop(one, None)
        self._write(SETTLED, *struck)

    def forget_batches(self) -> None:
        """Note that whatever went will not come again: the data were reset."""
        self.settled(tuple(self._went))

    def forget_old(self, now: float) -> None:
        """Forget posts that nobody will send again."""
        for post in [post for post in self._posts.values() if now - post.at > LASTS_S]:
            if not post.busy.locked():
                self._drop(post)
                self._write(ENDED, post.number)

    async def _free(self, digest: str) -> Post | None:
        """Return a post with these bytes that is in doubt; one that was begun for a client that is gone ends first."""
        while (post := self._in_doubt(digest)) is not None and post.busy.locked():
            async with post.busy:
                pass
        return post

    def _in_doubt(self, digest: str) -> Post | None:
        alike = self._alike.get(digest, ())
        return next((post for post in alike if not post.busy.locked() or post.gone.is_set()), None)

    def _make_room(self) -> None:
        """Forget the oldest of too many."""
        if len(self._posts) >= MOST:
            oldest = next((post for post in self._posts.values() if not post.busy.locked()), None)
            if oldest is not None:
                self._drop(oldest)
                self._write(ENDED, oldest.number)

    def _add(self, post: Post) -> None:
        self._posts[post.number] = post
        self._alike.setdefault(post.digest, []).append(post)
        self._of_group.update(dict.fromkeys(post.ids, post))

    def _drop(self, post: Post) -> None:
        if self._posts.pop(post.number, None) is None:
            return
        for one in post.ids:
            del self._of_group[one]
        alike = self._alike[post.digest]
        alike.remove(post)
        if not alike:
            del self._alike[post.digest]

    def _load(self, now: float) -> None:
        lines = []
        with contextlib.suppress(FileNotFoundError):
            lines = self._path.read_text(errors="replace").split("\n")[:-1]
        for line in lines:
            match line.split():
                case [word, number, digest, *ids] if word == BEGUN:
                    self._add(Post(number, digest, tuple(ids), now, asyncio.Event()))
                case [word, number] if word == ENDED and number in self._posts:
                    self._drop(self._posts[number])
                case [word, one] if word == CAME and one in self._of_group:
                    self._of_group[one].came.add(one)
                case [word, *ids] if word == WENT:
                    self._went.update(dict.fromkeys(ids))
                case [word, *ids] if word == SETTLED:
                    for one in ids:
                        self._went.pop(one, None)

    def _rewrite(self) -> None:
        """Write down what is in doubt, and no more."""
        made = self._path.with_suffix(".new")
        with made.open("w") as out:
            out.write(" ".join((WENT, *self._went)) + "\n")
            for post in self._posts.values():
                out.write(" ".join((BEGUN, post.number, post.digest, *post.ids)) + "\n")
                out.writelines(f"{CAME} {one}\n" for one in post.came)
        made.replace(self._path)
        self.close()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._lines = 1 + len(self._posts)

    def _write(self, *words: str) -> None:
        if self._file == CLOSED:
            return
        try:
            os.write(self._file, (" ".join(words) + "\n").encode())
            self._lines += 1
            if self._lines > max(LEAST_LINES, 8 * len(self._posts)):
                self._rewrite()
        except OSError as error:
            logger.error("what is in doubt cannot be written down path=%s error=%s", self._path, error)
