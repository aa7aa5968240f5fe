"""Tasks that cannot end the event loop.

asyncio lets SystemExit and KeyboardInterrupt out of a task and past the loop: an `exit()` in a task that an environment
or its framework has started would end the worker, with the code of its choice. In this process neither means anything:
the signals have handlers of their own. So each task that user code may start raises a RuntimeError instead, which its
awaiter meets like any other error.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Final

from rolloutmq.schemas.printable import error_line

EXITS: Final = (SystemExit, KeyboardInterrupt)
"""What asyncio lets out of a task."""


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Let no task that the loop makes from now on end it. Running tasks are as they were."""
    loop.set_task_factory(_task)


def _task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
    return asyncio.Task(_Contained(coro), loop=loop, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises no exit. Otherwise the same: debuggers and frameworks look at its attributes.

    No `async def` around it: cancelled before its first step, that would leave the coroutine inside never awaited.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def send(self, value: Any, /) -> Any:
        try:
            return self._inner.send(value)
        except EXITS as error:
            raise _contained(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except EXITS as exited:
            raise _contained(exited) from exited

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _contained(error: BaseException) -> RuntimeError:
    return RuntimeError(error_line(error))
