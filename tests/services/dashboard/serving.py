"""The server of a page in a thread of this process, with a real socket; and runs of any size to look at."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.services.dashboard.browser import Browser

from rolloutmq.services.dashboard.entry.sessions import Sessions
from rolloutmq.services.dashboard.server import bind, link_of, serve
from rolloutmq.services.process.runner import Stop


@contextmanager
def serving(root: Path, sessions: Sessions | None = None, port: int = 0) -> Iterator[Browser]:
    """Serve the page of a run within the block; yield a browser at its link."""
    sessions = sessions or Sessions()
    bound = bind("127.0.0.1", port)
    bound.listen()
    link = link_of(bound, sessions.token)
    with _thread(root, bound, sessions):
        yield Browser(link)


@contextmanager
def serving_tls(root: Path) -> Iterator[tuple[int, str]]:
    """Serve the page of a run with a certificate within the block; yield the port, and the token of the link."""
    sessions, bound = Sessions(), bind("127.0.0.1", 0)
    bound.listen()
    port = int(bound.getsockname()[1])
    with _thread(root, bound, sessions):
        yield port, sessions.token


@contextmanager
def _thread(root: Path, bound: socket.socket, sessions: Sessions) -> Iterator[None]:
    ready, failed = threading.Event(), list[BaseException]()
    ends: list[Callable[[], Any]] = []

    async def run() -> None:
        stop, loop = Stop(), asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.request, "test"))
        ready.set()
        await serve(root, bound, sessions, stop)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - raised in the test
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main, name="dashboard")
    thread.start()
    ready.wait(60)
    try:
        yield
    finally:
        for end in ends:
            end()
        thread.join(60)
        bound.close()
    if failed:
        raise failed[0]


@contextmanager
def opened(root: Path) -> Iterator[Browser]:
    """Serve the page, and enter."""
    with serving(root) as browser:
        assert browser.enter().status == 204
        yield browser
