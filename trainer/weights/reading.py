"""One turn of a reader at shared weights: `with share.reading() as version`."""

from typing import Protocol

from rolloutmq.schemas.envelope import PolicyVersion


class Readable(Protocol):
    """A share that can be held still."""

    def _begin_reading(self, patience_s: float) -> PolicyVersion: ...

    def _end_reading(self) -> None: ...


class Reading:
    """Holds the weights still as long as the block lasts. A generator in its place would take twice as long."""

    __slots__ = ("_patience_s", "_share")

    def __init__(self, share: Readable, patience_s: float) -> None:
        self._share = share
        self._patience_s = patience_s

    def __enter__(self) -> PolicyVersion:
        return self._share._begin_reading(self._patience_s)

    def __exit__(self, *_error: object) -> None:
        self._share._end_reading()
