"""A coroutine as a blocking call, without a running loop and inside one."""

import asyncio
import subprocess
import sys
import textwrap
import threading

import pytest

from rolloutmq.services.process.blocking_call import run_blocking


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def failing() -> None:
    raise ValueError("mine")


def test_without_a_loop_it_runs_in_the_calling_thread() -> None:
    assert run_blocking(thread_name()) == threading.current_thread().name
    with pytest.raises(ValueError, match="mine"):
        run_blocking(failing())


def test_a_failure_has_no_error_of_the_call_as_its_context() -> None:
    with pytest.raises(ValueError, match="mine") as caught:
        run_blocking(failing())
    assert caught.value.__context__ is None


async def test_inside_a_loop_it_runs_in_another_thread() -> None:
    assert run_blocking(thread_name()) == "rolloutmq call"
    with pytest.raises(ValueError, match="mine"):
        run_blocking(failing())
    assert not [thread for thread in threading.enumerate() if thread.name == "rolloutmq call"]


def test_an_interrupt_cancels_it_inside_a_loop() -> None:
    code = """
        import asyncio, os, signal

        from rolloutmq.services.process.blocking_call import run_blocking

        async def hang():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                print("cancelled")
                raise

        async def cell():
            try:
                run_blocking(hang())
            except KeyboardInterrupt:
                print("interrupted")

        signal.signal(signal.SIGINT, signal.default_int_handler)
        loop = asyncio.new_event_loop()  # as that of a kernel, which leaves SIGINT alone
        loop.run_until_complete(cell())
        loop.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["cancelled", "interrupted"]), done.stderr


def test_an_interrupt_before_a_loop_that_cannot_be_made_ends_too() -> None:
    code = """
        import asyncio, errno, faulthandler, os, signal, threading

        from rolloutmq.services.process.blocking_call import run_blocking

        faulthandler.dump_traceback_later(60, exit=True)
        interrupted = threading.Event()

        def unmade(work):
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.wait()
            work.close()
            raise OSError(errno.EMFILE, "Too many open files")

        def interrupt(*_):
            interrupted.set()
            raise KeyboardInterrupt

        async def cell():
            asyncio.run = unmade
            try:
                run_blocking(asyncio.sleep(0))
            except KeyboardInterrupt:
                print("interrupted")

        signal.signal(signal.SIGINT, interrupt)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(cell())
        loop.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["interrupted"], "")


def test_a_thread_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unstarted(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def cell() -> None:
        run_blocking(thread_name())

    monkeypatch.setattr(threading.Thread, "start", unstarted)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        asyncio.run(cell())
