"""A clean exit: a bare PUSH loses messages, a producer loses none.

libzmq stops reading a connection whose queue is at its high-water mark. If the peer closes while reading is stopped,
the data in the kernel's buffer is dropped when reading starts again. The peer has handed everything to the kernel,
its linger has nothing to wait for, and it exits with 0.
"""

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec
import zmq
from tests.bus.transport.fake_broker import FakeBroker
from tests.faults.support.leaving import names

from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.producer.spool_file import SpoolFile
from rolloutmq.schemas.files import AckedGroup
from rolloutmq.schemas.wire.requests import Goodbye, RegisterProducer

ROOT = Path(__file__).parents[2]
TRIES = 20
"""Most bare closes lose; twenty in a row that do not would say the library has changed."""
MESSAGES = 100
LIVES = 6
GROUPS = 400
LIMIT_S = 120.0

BARE = """
import sys, zmq
context = zmq.Context()
push = context.socket(zmq.PUSH)
push.linger = -1
push.connect(sys.argv[1])
for number in range(int(sys.argv[2])):
    push.send(number.to_bytes(4, "big") + bytes(1000))
print("closing", flush=True)
push.close()
context.term()
"""


def bare_close(address: str) -> int:
    """Have a child send, close with infinite linger and exit; return how many of its messages arrived."""
    context = zmq.Context()
    with context.socket(zmq.PULL) as pull:
        pull.rcvhwm = 1
        pull.bind(address)
        command = [sys.executable, "-c", BARE, address, str(MESSAGES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"closing\n"
            came = []
            try:
                while pull.poll(500):
                    came.append(int.from_bytes(pull.recv()[:4], "big"))
                assert child.wait(LIMIT_S) == 0
            finally:
                child.kill()  # it would linger for ever, and the block waits for it
    context.term()
    assert came == list(range(len(came)))
    return len(came)


def test_a_bare_push_that_lingers_for_ever_and_exits_in_order_loses_its_last_messages(run_dir: Path) -> None:
    assert any(bare_close(f"ipc://{run_dir}/{number}") < MESSAGES for number in range(TRIES))


def saved(spool: Path) -> list[str]:
    """Return the ids of the groups in a saved spool."""
    session = SessionState(RegisterProducer(producer="p", env="e"), Spool(1 << 30))
    SpoolFile(spool, session).load()
    return [entry.header.group_id for entry in session.spool]


def acked(log: Path) -> list[str]:
    return [msgspec.json.decode(line, type=AckedGroup).group_id for line in log.read_bytes().splitlines()]


async def says(child: Process, word: str) -> None:
    assert child.stdout is not None
    assert (await asyncio.wait_for(child.stdout.readline(), LIMIT_S)).decode().strip() == word


async def reads_again(fake: FakeBroker, life: int, child: Process) -> None:
    """Start reading again at another moment of the child's end in each life."""
    if life % 3 == 1:
        await fake.until(lambda: len(fake.asked_for(Goodbye)) == life + 1, LIMIT_S)
    elif life % 3 == 2:
        await asyncio.wait_for(child.wait(), LIMIT_S)
    fake.reading.set()


async def test_a_producer_that_leaves_in_order_never_loses_a_group(run_dir: Path) -> None:
    """One life after the other ends while the reader is stopped; every group is acked, or saved and resent."""
    spool, log = run_dir / "spools" / "p", run_dir / "acks" / "p.jsonl"
    fake, saves = FakeBroker(run_dir), 0
    sent: list[str] = []
    fake.hwm = 1
    async with fake.running():
        for life in range(LIVES + 1):
            count = GROUPS if life < LIVES else 0
            places = [str(run_dir), str(spool), str(log)]
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.faults.support.leaving", *places, str(life), str(count),
                cwd=ROOT, stdin=PIPE, stdout=PIPE,
            )  # fmt: skip
            await says(child, "open")
            assert not spool.exists()
            assert acked(log) == sent
            assert child.stdin is not None
            fake.reading.clear()
            child.stdin.write(b"\n")
            sent += names(str(life), count)
            await says(child, "leaving")
            await reads_again(fake, life, child)
            assert await asyncio.wait_for(child.wait(), LIMIT_S) == 0
            child.stdin.close()
            assert acked(log) + saved(spool) == sent
            assert set(acked(log)) <= fake.taken.keys()
            saves += spool.exists()
    assert fake.taken == dict.fromkeys(sent, 1)
    assert saves >= LIVES // 3
