"""The loop thread, and both facades against a real broker."""

import asyncio
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from rolloutmq.bus import blocking
from rolloutmq.bus.blocking import Facade, LoopThread, _Outcome
from rolloutmq.bus.consumer.client import BlockingConsumer, Consumer
from rolloutmq.bus.producer.client import BlockingProducer, Producer
from rolloutmq.bus.tasks.client import BlockingTaskClient, TaskClient
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ClosedError, ConsumerFencedError, DrainingError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.services.broker.server import running_broker

MakeGroup = Callable[..., Group]


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread("a loop")
    yield thread
    thread.close()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


FUTURES = {"send_acked", "handed_over"}
"""They return futures of a loop."""


@pytest.mark.parametrize(
    ("client", "facade"),
    [(Producer, BlockingProducer), (Consumer, BlockingConsumer), (TaskClient, BlockingTaskClient)],
)
def test_a_facade_has_every_name_of_its_client(client: type, facade: type) -> None:
    class_methods = {"open", "blocking"}
    names = {name for name in vars(client) if not name.startswith("_")} - class_methods - FUTURES
    assert names - set(dir(facade)) == set()


def test_a_call_gives_its_result_or_its_error(loop_thread: LoopThread) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def fail() -> None:
        raise ValueError("no")

    assert loop_thread.run(double(4)) == 8
    with pytest.raises(ValueError, match="no"):
        loop_thread.run(fail())


def test_calls_from_several_threads_go_on_together(loop_thread: LoopThread) -> None:
    both = asyncio.Barrier(2)

    async def meet() -> None:
        await both.wait()

    other = threading.Thread(target=lambda: loop_thread.run(meet()))
    other.start()
    loop_thread.run(meet())
    other.join()


def test_an_interrupted_call_has_ended_when_the_interrupt_arrives(loop_thread: LoopThread) -> None:
    ended = []

    async def wait_for_ever() -> None:
        # From here the main thread waits for the call, or is about to: both must do.
        asyncio.get_running_loop().call_later(0.05, interrupt)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        loop_thread.run(wait_for_ever())
    assert ended
    assert loop_thread.run(asyncio.sleep(0, "usable")) == "usable"


def test_a_call_that_is_cancelled_before_its_first_turn_ends(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, began = threading.Event(), threading.Event()

    class Interrupted(_Outcome[None]):
        def wait(self, interrupted: Callable[[], None]) -> None:
            interrupted()
            held.set()
            super().wait(interrupted)

    async def work() -> None:
        began.set()

    monkeypatch.setattr(blocking, "_Outcome", Interrupted)
    loop_thread.post(lambda: None if held.wait(30) else pytest.fail("not cancelled"))
    with pytest.raises(ClosedError):
        loop_thread.run(work())
    assert not began.is_set()


def test_a_function_gives_its_result_or_its_error(loop_thread: LoopThread) -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    assert loop_thread.call(threading.get_ident) != threading.get_ident()
    assert loop_thread.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ValueError, match="no"):
        loop_thread.call(fail, "no")
    assert loop_thread.call(divmod, 7, 2) == (3, 1)


async def test_another_loop_awaits_a_call_and_cancels_it(loop_thread: LoopThread) -> None:
    began, ended = threading.Event(), threading.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def thread() -> str:
        return threading.current_thread().name

    assert await asyncio.wrap_future(loop_thread.future(thread())) == "a loop"
    waiting = asyncio.ensure_future(asyncio.wrap_future(loop_thread.future(forever())))
    assert await asyncio.to_thread(began.wait, 20)
    waiting.cancel()
    assert await asyncio.to_thread(ended.wait, 20)
    loop_thread.close()
    with pytest.raises(ClosedError):
        loop_thread.future(thread())


def test_an_interrupted_function_has_ended_when_the_interrupt_arrives(loop_thread: LoopThread) -> None:
    arrived = threading.Event()
    ended = []

    def work() -> None:
        # The main thread's handler runs while this function holds it up; before it waits, it may not hear of a signal.
        interrupt()
        while not arrived.wait(0.5):
            interrupt()
        ended.append(True)

    def handler(*_: object) -> None:
        arrived.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop_thread.call(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended
    assert loop_thread.call(divmod, 7, 2) == (3, 1)


def test_an_interrupt_at_the_moment_of_the_result_does_not_wait_for_another() -> None:
    class Late:
        """A lock whose holder is interrupted when it has it."""

        def __init__(self) -> None:
            self.taken = 0

        def acquire(self) -> None:
            self.taken += 1
            raise KeyboardInterrupt

        def release(self) -> None:
            return

    outcome: _Outcome[int] = _Outcome()
    late = outcome._done = Late()  # type: ignore[assignment]
    outcome.succeed(1)
    with pytest.raises(KeyboardInterrupt):
        outcome.wait(lambda: None)
    assert late.taken == 1


def test_a_closed_loop_says_so() -> None:
    thread = LoopThread("a loop")
    thread.close()
    thread.close()
    with pytest.raises(ClosedError):
        thread.call(divmod, 7, 2)
    with pytest.raises(ClosedError):
        thread.run(asyncio.sleep(0))


def test_the_block_of_a_facade_ends_the_object_whatever_ends_the_block() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def opening() -> AsyncIterator[str]:
        seen.append("open")
        try:
            yield "object"
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), Facade(opening, "a facade"):
            raise error
    assert seen == ["open", "closed"] * 2


def test_a_facade_that_cannot_be_opened_leaves_no_thread() -> None:
    class Broken:
        async def __aenter__(self) -> str:
            raise ValueError("no")

        async def __aexit__(self, *_: object) -> None: ...

    with pytest.raises(ValueError, match="no"):
        Facade(Broken, "a facade").__enter__()
    assert "a facade" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Path]:
    config = RunConfig(environment={"e": EnvironmentConfig(entry="a:B", group_size=2, pacing=False)})
    with running_broker(config, RunLayout(run_dir)):
        yield run_dir


def test_groups_go_from_a_blocking_producer_to_a_blocking_consumer(broker: Path, group: MakeGroup) -> None:
    with (
        Producer.blocking(broker, env="e", producer="p", group_size=2, slots=4) as p,
        Consumer.blocking(broker, sequences=4) as c,
    ):
        for index in range(6):
            p.send(group(f"g-{index}"))
        assert p.flush(30)
        assert p.accepted == 6
        assert p.session
        trained = []
        for batch in c:
            trained += [g.group_id for g in batch.groups]
            assert batch.sequences == 4
            c.progress()
            batch.ack()
            if c.version.step == 2:
                break
        batch = c.pull(3, c.version)
        c.settle(batch, filtered=[g.group_id for g in batch.groups])
        c.commit(c.version)
        assert c.pull(4, c.version, wait_s=0.0) is None
        assert trained == ["g-0", "g-1", "g-2", "g-3"]
        p.abandon(p.acquire())
        p.start_draining()
        assert p.draining
        with pytest.raises(DrainingError):
            p.send(group("late"))
    with pytest.raises(ClosedError):
        p.send(group("late"))
    with pytest.raises(ClosedError):
        next(c)


def test_an_interrupt_while_sending_and_pulling_closes_in_order(broker: Path, group: MakeGroup) -> None:
    timers: list[threading.Timer] = []

    def soon() -> None:
        timers.append(threading.Timer(0.2, interrupt))
        timers[-1].start()

    with Consumer.blocking(broker, sequences=4) as c:
        soon()
        with pytest.raises(KeyboardInterrupt):
            next(c)
        with Producer.blocking(broker, env="e", producer="p", group_size=2) as p:
            p.send(group("g-0"))
            p.send(group("g-1"))
        batch = next(c)
        assert len(batch.groups) == 2
        with Consumer.blocking(broker, sequences=4):
            pass
        with pytest.raises(ConsumerFencedError, match="consumer trainer-0: another process"):
            batch.ack()
    for timer in timers:
        timer.join()


FORKING = """
import os, sys, traceback
from rolloutmq import Consumer, ForkedError, Group, Producer

where, kind, leaving = sys.argv[1:]
rows = [[1, 2], [3]]
made = lambda name: Group.build(name, tokens=rows, mask=rows, scores=[0.0, 1.0])

def in_child(use):
    try:
        use()
    except ForkedError as error:
        assert f"opened by process {os.getppid()} and used in a forked child" in str(error), error
        print("refused", flush=True)

def forked(use, opened):
    child = os.fork()
    if not child:
        in_child(use)
        if leaving == "exit":
            sys.exit(0)  # leaves the block, too
        opened.close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print("child", os.waitstatus_to_exitcode(status), flush=True)

if kind == "producer":
    with Producer.blocking(where, env="e", group_size=2) as p:
        p.send(made("before"))
        forked(lambda: p.send(made("child")), p)
        p.send(made("after"))
        assert p.flush(60) and p.accepted == 2
else:
    with Producer.blocking(where, env="e", group_size=2) as p, Consumer.blocking(where, sequences=2) as c:
        p.send(made("one"))
        p.send(made("two"))
        batch = next(c)
        forked(lambda: next(c), c)
        batch.ack()
        next(c).ack()
"""


@pytest.mark.parametrize("leaving", ["exit", "close"])
@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_a_forked_child_is_refused_and_ends_and_the_parent_goes_on(
    broker: Path, kind: str, leaving: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(broker), kind, leaving],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split("\n"), done.stderr) == (0, ["refused", "child 0", ""], "")


FORKING_LOOP = """
import asyncio, os, sys
from rolloutmq import Consumer, ForkedError, Group, Producer

async def main(where):
    rows = [[1, 2], [3]]
    group = Group.build("g", tokens=rows, mask=rows, scores=[0.0, 1.0])
    async with Producer.open(where, env="e", group_size=2) as p, Consumer.open(where, sequences=2) as c:
        child = os.fork()
        if not child:
            for call in (p.send(group), p.acquire(), p.flush(), c.pull(1, c.version)):
                try:
                    await call
                except ForkedError:
                    print("refused", flush=True)
            os._exit(0)  # as multiprocessing does: both processes share the loop's epoll set
        status = await asyncio.to_thread(os.waitpid, child, 0)
        print("child", os.waitstatus_to_exitcode(status[1]), flush=True)
        await p.send(group)
        await (await c.pull(1, c.version)).ack()

asyncio.run(main(sys.argv[1]))
"""


def test_a_child_forked_in_a_loop_is_refused_too(broker: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING_LOOP, str(broker)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 4 + ["child", "0"]), done.stderr


def test_a_flush_waits_for_what_was_sent_before_it_while_others_send(broker: Path, group: MakeGroup) -> None:
    with Producer.blocking(broker, env="e", producer="p", group_size=2, slots=64) as p:
        over = threading.Event()

        def send() -> None:
            for index in count():
                if over.is_set():
                    return
                p.send(group(f"other-{index}"))

        with ThreadPoolExecutor(2) as pool:
            senders = [pool.submit(send)]
            try:
                for index in range(10):
                    p.send(group(f"own-{index}"))
                    assert p.flush()
                    assert p.flush(60)
            finally:
                over.set()
            senders[0].result()


def test_a_client_says_why_it_is_not_pickled(broker: Path) -> None:
    """Frameworks pickle what a function captures, and `cloudpickle` would pickle also a client that is not open."""
    with (
        Producer.blocking(broker, env="e", group_size=2) as p,
        Consumer.blocking(broker, sequences=2) as c,
        TaskClient.blocking(broker) as t,
    ):
        rows = [[1, 2], [3]]
        p.send(Group.build("g", tokens=rows, mask=rows, scores=[0.0, 1.0]))
        batch = next(c)
        unopened = Producer.blocking(broker, env="e")
        for client in (p, p.send, p._object, c, c._object, t, t._object, unopened):
            with pytest.raises(
                UsageError, match=r": cannot be pickled .* pass a run directory or `rolloutmq.rem"
            ):
                pickle.dumps(client)
        for use in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match=r"BlockingBatch: cannot be pickled .* pass its `groups`"):
                use(batch)
        (group,) = pickle.loads(pickle.dumps(batch.groups))
        assert [list(row) for row in group["tokens"]] == rows
        batch.ack()
