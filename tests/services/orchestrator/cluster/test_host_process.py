"""One life on a host: a real worker that reaches a real broker by TCP with a key; its lease, its output and its end."""

import asyncio
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.launch.commands.remote.hosts import Hosts, wait_until

from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.orchestrator.cluster import host_process
from rolloutmq.services.orchestrator.cluster.host_process import HostProcess, Output
from rolloutmq.services.orchestrator.cluster.messages import (
    LOG_PART_BYTES,
    HostOrder,
    HostState,
    Program,
    own_version,
)
from rolloutmq.services.process.child import Process
from rolloutmq.services.process.identity import find_marked, runs
from rolloutmq.services.programs.command import RUN_DIR
from rolloutmq.services.programs.tied import NO_PROGRAM

TOKEN = "hosting"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    made.broker()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory in which the hosts make theirs."""
    found = tmp_path / "tmp"
    found.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def order(hosts: Hosts, lease_s: float = 60.0, version: str = own_version()) -> HostOrder:
    key = hosts.root / "host.key"
    return HostOrder(
        life="life",
        name="own-0",
        words=("worker", "--worker", "own-0"),
        token=TOKEN,
        run="sums",
        version=version,
        addresses=(hosts.address,),
        key=(key if key.exists() else hosts.key("host", Role.WORKER)).read_bytes(),
        lease_s=lease_s,
        term_grace_s=1.0,
    )


class Following:
    """Looks at a life as the service does, and keeps its output."""

    def __init__(self, process: HostProcess) -> None:
        self._process = process
        self.output, self.acked = b"", 0

    def look(self) -> HostState:
        told = self._process.look(self.acked, 0.1)
        assert told.offset == self.acked, "output is missing"
        self.output += told.output
        self.acked += len(told.output)
        return told

    def until(self, met: Callable[[HostState], object], what: str) -> HostState:
        def looked() -> HostState | None:
            told = self.look()
            return told if met(told) else None

        found = wait_until(looked, what)
        assert found is not None
        return found


def test_a_worker_delivers_drains_and_leaves_nothing(hosts: Hosts, directories: Path) -> None:
    process = HostProcess(order(hosts), base_dir=hosts.code)
    following = Following(process)
    state = following.until(lambda told: told.state.pid, "a process").state
    keys = [path for path in directories.rglob("key")]
    assert [path.stat().st_mode & 0o777 for path in keys] == [0o600]
    hosts.ready("own-0")
    assert runs(state.pid, state.start_ticks)
    process.send(signal.SIGUSR1, False)
    state = following.until(lambda told: told.state.over and not told.output, "the end").state
    assert (state.code, state.why) == (0, "")
    assert b"worker ended produced=" in following.output
    process.close()
    assert [*directories.iterdir()] == []
    assert find_marked(f"{TOKEN}/") == []


def test_a_repeated_signal_is_ignored_but_for_sigkill(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second SIGTERM would end a worker that drains at once."""
    sent, real = [], host_process._signal

    def signalled(process: Process, number: int, group: bool) -> None:
        sent.append((number, group))
        real(process, number, group)

    monkeypatch.setattr(host_process, "_signal", signalled)
    process = HostProcess(order(hosts), base_dir=hosts.code)
    following = Following(process)
    following.until(lambda told: told.state.pid, "a process")
    hosts.ready("own-0")
    for number in (signal.SIGCONT, signal.SIGCONT, signal.SIGKILL, signal.SIGKILL):
        process.send(number, True)
    following.until(lambda told: told.state.over, "the end")
    process.close()
    assert sent[:2] == [(signal.SIGCONT, True), (signal.SIGKILL, True)]
    assert (signal.SIGCONT, True) not in sent[2:]


def test_a_silent_run_ends_the_process_and_then_the_host_says_so(hosts: Hosts, directories: Path) -> None:
    silent = threading.Event()
    process = HostProcess(order(hosts, lease_s=3.0), silent.set, base_dir=hosts.code)
    state = Following(process).until(lambda told: told.state.pid, "a process").state
    assert silent.wait(60.0)
    assert not runs(state.pid, state.start_ticks)
    assert [*directories.iterdir()] == []
    process.close()


def test_a_silent_run_is_noticed_after_the_end_of_the_process_too(hosts: Hosts) -> None:
    """Nobody is left to remove it: it would keep its resources on the cluster for ever."""
    silent = threading.Event()
    process = HostProcess(order(hosts, lease_s=3.0, version="0.0.1"), silent.set, base_dir=hosts.code)
    Following(process).until(lambda told: told.state.over, "the end")
    assert not silent.is_set()
    assert silent.wait(30.0)
    process.close()


def test_a_removed_life_does_not_wait_for_its_lease(hosts: Hosts) -> None:
    silent = threading.Event()
    process = HostProcess(order(hosts, version="0.0.1"), silent.set, base_dir=hosts.code)
    Following(process).until(lambda told: told.state.over, "the end")
    process.close(timeout_s=30.0)
    assert not process._thread.is_alive()
    assert not silent.is_set()


def test_a_killed_process_is_told_with_its_signal(hosts: Hosts) -> None:
    process = HostProcess(order(hosts), base_dir=hosts.code)
    following = Following(process)
    following.until(lambda told: told.state.pid, "a process")
    process.send(signal.SIGKILL, True)
    assert following.until(lambda told: told.state.over, "the end").state.code == -signal.SIGKILL
    process.close()


def test_groups_that_the_run_does_not_take_are_kept(
    hosts: Hosts, directories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_root: Path, spools: Path, **_: object) -> None:
        spools.mkdir(parents=True, exist_ok=True)
        (spools / "own-0").write_bytes(b"groups")
        await asyncio.Event().wait()

    monkeypatch.setattr(host_process, "resend_spools", never)
    process = HostProcess(order(hosts), base_dir=hosts.code)
    following = Following(process)
    following.until(lambda told: told.state.pid, "a process")
    process.send(signal.SIGKILL, True)
    waits = "the run, to take the groups that it left"
    assert not following.until(lambda told: told.state.waits_for == waits, "the delivery").state.over
    process.close(timeout_s=30.0)
    (kept,) = directories.glob("*/run/spools/own-0")
    why = process.look(-1, 0.0).state.why
    assert why == f"1 files of its groups stay unsent on its host, in {kept.parent}"
    assert not [*directories.rglob("key")]


def test_a_host_of_another_version_starts_nothing(hosts: Hosts) -> None:
    process = HostProcess(order(hosts, version="0.0.1"), base_dir=hosts.code)
    state = Following(process).until(lambda told: told.state.over, "the end").state
    assert state.pid == 0
    assert "(the run has 0.0.1); install the same version on every host" in state.why
    process.close()


def test_a_signal_before_the_start_prevents_it(hosts: Hosts) -> None:
    away = msgspec.structs.replace(order(hosts), addresses=("tcp://127.0.0.1:1",))
    process = HostProcess(away, base_dir=hosts.code)
    following = Following(process)
    following.until(lambda told: "127.0.0.1:1" in told.state.waits_for, "the reason of the wait")
    process.send(signal.SIGTERM, True)
    state = following.until(lambda told: told.state.over, "the end").state
    assert state.why == "was ended before it started"
    process.close()


@pytest.mark.parametrize("is_program", [False, True])
def test_a_process_dies_with_its_host(hosts: Hosts, tmp_path: Path, is_program: bool) -> None:
    """A killed actor ends no thread in order: the kernel kills what it has started."""
    code = f"""
import msgspec, sys, tempfile
from pathlib import Path
from rolloutmq.services.orchestrator.cluster.host_process import HostProcess
from rolloutmq.services.orchestrator.cluster.messages import HostOrder
tempfile.tempdir = {str(tmp_path / "tmp")!r}
order = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostOrder)
process = HostProcess(order, base_dir=Path({str(hosts.code)!r}))
while not (state := process.look(-1, 0.1).state).pid:
    assert not state.over, state.why
print(state.pid, state.start_ticks, file=sys.stderr, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as host:
        assert host.stdin is not None
        assert host.stderr is not None
        helper = "setsid sleep 600 & exec sleep 600"
        ordered = program(hosts, "sh", "-c", helper) if is_program else order(hosts)
        host.stdin.write(msgspec.json.encode(ordered) + b"\n")
        host.stdin.flush()
        lines = iter(host.stderr.readline, b"")
        pid, ticks = next(map(int, line.split()) for line in lines if line.split()[0].isdigit())
        wait_until(lambda: len(find_marked(f"{TOKEN}/")) == 1 + is_program, "its helper")
        assert runs(pid, ticks)
        host.kill()
        wait_until(
            lambda: not find_marked(f"{TOKEN}/") and not runs(pid, ticks),
            "the end of the process and its helper",
        )
        wait_until(lambda: not [*(tmp_path / "tmp").glob("*/key")], "the end of the key")


PROGRAM = """
import os, sys, signal
from pathlib import Path
print(sys.argv[1] == os.environ["ROLLOUTMQ_RUN_DIR"], Path(sys.argv[1], "config.json").exists(), flush=True)
print(Path.cwd(), os.environ["OWN"], "ROLLOUTMQ_PARENT" in os.environ, flush=True)
signal.pause()
"""


def program(hosts: Hosts, *argv: str) -> HostOrder:
    made = Program(argv=argv, variables={"OWN": "<own-0>", "ROLLOUTMQ_RUN_DIR": RUN_DIR})
    return msgspec.structs.replace(order(hosts), words=(), program=made)


def test_a_program_has_the_directory_and_the_variables_of_its_host(hosts: Hosts) -> None:
    process = HostProcess(program(hosts, sys.executable, "-c", PROGRAM, RUN_DIR), base_dir=hosts.code)
    following = Following(process)
    following.until(lambda _: following.output.count(b"\n") == 2, "what it says")
    assert following.output.decode().splitlines() == ["True True", f"{hosts.code} <own-0> False"]
    process.send(signal.SIGTERM, True)
    assert following.until(lambda told: told.state.over, "the end").state.code == -signal.SIGTERM
    process.close()


def test_a_program_that_its_host_does_not_have_is_named(hosts: Hosts) -> None:
    process = HostProcess(program(hosts, "no-such-program"), base_dir=hosts.code)
    following = Following(process)
    state = following.until(lambda told: told.state.over and not told.output, "the end").state
    assert state.code == NO_PROGRAM
    assert "there is no program to run on" in following.output.decode()
    assert "(got 'no-such-program': No such file or directory)" in following.output.decode()
    process.close()


def test_output_is_bounded_and_counted() -> None:
    output = Output(limit_bytes=10)
    output.add(b"0123456789")
    assert output.part(0) == (0, b"0123456789")
    assert output.part(4) == (4, b"456789")
    assert output.part(-1) == (4, b"456789")
    output.add(b"abcdefgh")
    assert output.part(4) == (8, b"89abcdefgh")
    assert output.end == 18
    assert output.part(99) == (18, b"")
    large = Output()
    large.add(b"x" * (LOG_PART_BYTES + 5))
    assert len(large.part(0)[1]) == LOG_PART_BYTES
