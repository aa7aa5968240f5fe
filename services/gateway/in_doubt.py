"""Operations in doubt after a crash of this process: posts perhaps answered, and a batch perhaps delivered.

A client with a broken connection cannot know whether its groups arrived, and sends the same bytes again. So a post is
recorded with the ids of its groups before they go to the broker, and removed when its reply is on its way. While it is
in doubt, the same bytes get the same ids: the broker recognizes the groups it still has, and this file those delivered
to the trainer. Without doubt the same bytes are a new group.

The same holds for a trainer's batch. The gateway settles it a moment after its last byte left; a crash in that moment
would deliver its groups again, perhaps in another batch. So the groups of a batch are recorded as soon as it has left,
and removed when settled.

The file survives a crash of this process, not a power cut: it is not synced, since every post would wait for that.
While the disk is full nothing is recorded, and posts are delivered nevertheless.
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

from rolloutmq.bus.files import private_fd, private_file, read_regular

logger = logging.getLogger(__name__)

LASTS_S: Final = 1200.0
"""Time after which a post is forgotten. Clients give up long before: three attempts of at most 300 s."""
DIGEST_BYTES: Final = 16
ID_BYTES: Final = 12
MOST: Final = 1 << 16
"""Maximum posts in doubt; beyond it the oldest is forgotten."""
CLOSED: Final = -1
LEAST_LINES: Final = 4096
"""Lines from which the file is rewritten, once most of them are obsolete."""
BEGUN, ENDED, CAME, WENT, SETTLED = "begun", "ended", "came", "went", "settled"


@dataclass(slots=True, eq=False)
class Post:
    """Groups of one body.

    Attributes:
        ids: Ids of its groups, in order.
        came: Ids the broker is known to have accepted.
        busy: Free while no request works on it.
        gone: Set when the client of that request is gone.
    """

    number: str
    digest: str
    ids: tuple[str, ...]
    at: float
    gone: asyncio.Event
    came: set[str] = field(default_factory=set)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


def digest_of(body: bytes | bytearray) -> bytes:
    """Return the digest that identifies an inflated body. Takes milliseconds per megabyte."""
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


class InDoubt:
    """Posts of one gateway without a confirmed reply.

    Args:
        path: File of the record; created if missing.
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
            logger.error("posts in doubt not recorded path=%s error=%s", path, error)

    def __len__(self) -> int:
        return len(self._posts)

    def close(self) -> None:
        """Close the file; later replies leave their posts in doubt."""
        if self._file != CLOSED:
            os.close(self._file)
        self._file = CLOSED

    async def begin(self, digest: bytes, groups: int, gone: asyncio.Event, now: float) -> Post:
        """Return the post of a body: one in doubt, or a new one. `end` or `leave` it.

        Args:
            digest: Digest of its body; see `digest_of`.
            groups: Number of its groups.
            gone: Set when its client is gone.
            now: Monotonic.
        """
        alike = digest.hex()
        while (post := await self._free(alike, groups)) is not None:
            await post.busy.acquire()
            if post.number in self._posts:
                break
            post.busy.release()  # another request with these bytes came first and ended it
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
        """Remove a post: its reply is on its way, or it was rejected."""
        self._drop(post)
        self._write(ENDED, post.number)
        post.busy.release()

    def leave(self, post: Post) -> None:
        """Leave a post in doubt: its client may or may not have a reply."""
        post.busy.release()

    def came(self, ids: Iterable[str]) -> None:
        """Record groups that need no resend: the broker has them, or the trainer."""
        for one in ids:
            post = self._of_group.get(one)
            if post is not None and one not in post.came:
                post.came.add(one)
                self._write(CAME, one)

    def hand_out(self, ids: Iterable[str]) -> None:
        """Record the groups of a batch whose last byte is on its way to the trainer."""
        went = tuple(ids)
        self._went.update(dict.fromkeys(went))
        while len(self._went) > MOST:
            del self._went[next(iter(self._went))]
        self._write(WENT, *went)
        self.came(went)

    @property
    def went(self) -> Container[str]:
        """Return the groups that the trainer has and that are not settled."""
        return self._went

    def settled(self, ids: Iterable[str]) -> None:
        """Remove groups that will not be delivered again."""
        struck = tuple(ids)
        for one in struck:
            self._went.pop(one, None)
        self._write(SETTLED, *struck)

    def forget_batches(self) -> None:
        """Remove all delivered batches: the data were reset."""
        self.settled(tuple(self._went))

    def forget_old(self, now: float) -> None:
        """Forget posts that no client will send again."""
        for post in [post for post in self._posts.values() if now - post.at > LASTS_S]:
            if not post.busy.locked():
                self._drop(post)
                self._write(ENDED, post.number)

    async def _free(self, digest: str, groups: int) -> Post | None:
        """Return a post in doubt with these bytes; one of a client that is gone ends first."""
        while (post := self._in_doubt(digest, groups)) is not None and post.busy.locked():
            async with post.busy:
                pass
        return post

    def _in_doubt(self, digest: str, groups: int) -> Post | None:
        alike = [post for post in self._alike.get(digest, ()) if len(post.ids) == groups]
        return next((post for post in alike if not post.busy.locked() or post.gone.is_set()), None)

    def _make_room(self) -> None:
        """Forget the oldest posts beyond the limit."""
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
            lines = read_regular(self._path).decode(errors="replace").split("\n")[:-1]
        for line in lines:
            match line.split():
                case [word, number, digest, *ids] if word == BEGUN and self._is_new(number, ids):
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

    def _is_new(self, number: str, ids: list[str]) -> bool:
        """Return whether a line names a post, and groups, that no line before it named; otherwise it is damaged."""
        once = len(set(ids)) == len(ids) > 0
        return once and number not in self._posts and not any(one in self._of_group for one in ids)

    def _rewrite(self) -> None:
        """Rewrite the file with the posts in doubt only."""
        made = self._path.with_suffix(".new")
        with private_file(made, "wb") as out:
            out.write(f"{' '.join((WENT, *self._went))}\n".encode())
            for post in self._posts.values():
                out.write(f"{' '.join((BEGUN, post.number, post.digest, *post.ids))}\n".encode())
                out.writelines(f"{CAME} {one}\n".encode() for one in post.came)
        made.replace(self._path)
        self.close()
        self._file = private_fd(self._path, os.O_WRONLY | os.O_APPEND)
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
            logger.error("posts in doubt not recorded path=%s error=%s", self._path, error)
