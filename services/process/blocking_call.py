"""A coroutine as a blocking call, also inside a running event loop: the cell of a notebook is in one.

Without a running loop the coroutine runs in the calling thread, so that a debugger and Ctrl-C are where they always
are. Inside one it runs in a loop of another thread, since a loop cannot run in a loop; the outer one waits meanwhile.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

R = TypeVar("R")


def run_blocking(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end and return its result. Blocks.

    Ctrl-C cancels the coroutine and waits for its end.
    """
    return _in_thread(work) if _is_in_loop() else asyncio.run(work)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Coroutine[Any, Any, R]) -> R:
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[R]]] = Future()
    ended: Future[R] = Future()
    either: list[Future[Any]] = [started, ended]

    async def supervised() -> R:
        task = asyncio.ensure_future(work)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def main() -> None:
        try:
            ended.set_result(asyncio.run(supervised()))
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            ended.set_exception(error)

    thread = threading.Thread(target=main, name="rolloutmq call")
    try:
        thread.start()  # waits for it, so Ctrl-C may come here too
        return ended.result()
    except (KeyboardInterrupt, SystemExit):
        wait(either, return_when=FIRST_COMPLETED)  # a loop that cannot be made only ends
        if not ended.done():
            loop, task = started.result()
            with suppress(RuntimeError):  # it has ended since
                loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        if thread.ident is not None:
            thread.join()
        work.close()  # has no effect unless it never began
