"""Items that a thread makes while the caller uses those before: a cipher beside the network."""

import threading
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Final, TypeVar

_T = TypeVar("_T")
_END: Final = object()


def ahead(items: Iterator[_T], depth: int, name: str) -> Generator[_T]:
    """Yield items that a thread of this name makes; at most `depth + 1` exist at a time.

    These are the one that the caller uses until it asks for another, those made, and the one in the making. Closing
    the generator waits for the one in the making. An error in an item's making is raised here, in its turn.
    """
    made: SimpleQueue[object] = SimpleQueue()
    turns: SimpleQueue[None] = SimpleQueue()
    stopping = threading.Event()
    failed: list[BaseException] = []

    def make() -> None:
        try:
            while turns.get() is None and not stopping.is_set():
                made.put(item := next(items, _END))
                if item is _END:
                    return
        except BaseException as error:  # noqa: BLE001 - raised again where the item is asked for
            failed.append(error)
            made.put(_END)

    for _ in range(depth + 1):
        turns.put(None)
    thread = threading.Thread(target=make, name=name)
    thread.start()
    try:
        while (item := made.get()) is not _END:
            yield item  # type: ignore[misc]
            turns.put(None)
    finally:
        stopping.set()
        turns.put(None)
        thread.join()
    if failed:
        raise failed[0]
