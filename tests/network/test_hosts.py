"""The hosts of the network tests share nothing but the network, and leave nothing behind."""

import os
import sys
from pathlib import Path

import pytest
from tests.network.support import hosts
from tests.network.support.hosts import (
    HOME,
    ROOT,
    CannotNetworkError,
    Lab,
    Program,
    namespaces_of,
    processes_in,
)

from rolloutmq.bus.shm.segment_file import PREFIX

LISTEN = """
import socket
server, kept = socket.create_server(("0.0.0.0", 7000)), []
print("up", flush=True)
while True:
    kept.append(server.accept())
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 5).close()"


def listening(host: hosts.Host) -> Program:
    program = host.start("listen", sys.executable, "-c", LISTEN, answers=True)
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == b"up\n"
    return program


def test_hosts_reach_each_other_by_name_and_by_nothing_else(lab: Lab) -> None:
    one, other = lab.host("one", 1), lab.host("other", 2)
    listening(one)
    other.call(sys.executable, "-c", CONNECT, "one")
    # The same address on another switch is another network.
    apart = lab.host("apart", 3, "wan")
    with pytest.raises(AssertionError, match=r"timed out|No route to host"):
        apart.call(sys.executable, "-c", CONNECT, "one")


def test_a_host_has_no_file_of_another_host_or_of_the_caller(lab: Lab, tmp_path: Path) -> None:
    one, other = lab.host("one", 1), lab.host("other", 2)
    secret = tmp_path / "secret"
    secret.write_text("mine")
    one.call("sh", "-c", f"echo here > /tmp/file; echo here > /dev/shm/{PREFIX}file; echo here > {HOME}/file")
    assert (one.tmp / "file").read_text() == "here\n"
    assert not (other.tmp / "file").exists()
    seen = other.call(
        "sh", "-c", f"ls -d /tmp/file /dev/shm/* {HOME}/* {secret} {lab.place} 2>/dev/null; true"
    )
    assert seen == ""
    assert not Path(f"/dev/shm/{PREFIX}file").exists()
    beside = [path for path in (Path.home(), tmp_path.parent, ROOT.parent) if path.exists()]
    for path in beside:
        names = other.call("sh", "-c", f"ls -A {path} 2>/dev/null; true").split()
        mounted = {part for shared in hosts.shared_paths() for part in shared.parts}
        assert set(names) <= mounted, f"a host sees {path}"


def test_a_host_may_not_change_the_repository(lab: Lab) -> None:
    host = lab.host("one", 1)
    assert host.call("sh", "-c", f"ls {ROOT}/pyproject.toml")
    for path in hosts.shared_paths():
        with pytest.raises(AssertionError, match="Read-only file system"):
            host.call("sh", "-c", f"touch {path}/leak")


def test_a_host_sees_no_process_but_its_own(lab: Lab) -> None:
    lab.host("one", 1).start("sleep", "sleep", "1000")
    pids = lab.host("other", 2).call("sh", "-c", "ls /proc | grep -c '^[0-9]'")
    assert int(pids) <= 5  # the first process, the shell, and its pipe


def test_a_killed_program_is_gone_and_its_host_lives(lab: Lab) -> None:
    host = lab.host("one", 1)
    program = host.start("sleep", "sleep", "1000")
    pid = program.pid
    program.kill()
    assert not Path(f"/proc/{pid}").exists()
    assert host.call("echo", "alive") == "alive\n"


def test_a_pulled_cable_ends_no_connection(lab: Lab) -> None:
    one, other = lab.host("one", 1), lab.host("other", 2)
    echo = listening(one)
    wait = "import socket, sys; socket.create_connection(('one', 7000)).recv(1); print('ended')"
    waiting = other.start("wait", sys.executable, "-c", wait)

    def connected() -> bool:
        return ":1B58" in other.call("sh", "-c", "grep ' 01 ' /proc/net/tcp || true")

    waiting.expect(connected, "the connection", 20.0)
    other.unplug()
    echo.kill()
    assert connected()
    assert waiting.living()
    other.plug_in()


@pytest.mark.parametrize("as_user", [False, True], ids=["as this user", "by a user namespace"])
def test_a_lab_leaves_no_process_mount_or_namespace(tmp_path: Path, as_user: bool) -> None:
    if not as_user and os.geteuid():
        pytest.skip("needs root")
    if problem := hosts.problem():
        pytest.skip(f"no network namespaces for this user: {problem}")
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    with Lab(tmp_path / "lab", as_user=as_user) as lab:
        spaces = [namespaces_of(lab.pid), *(namespaces_of(lab.host(f"h{n}", n).pid) for n in (1, 2))]
        lab.hosts[0].start("orphan", "sh", "-c", "sleep 1000 & sleep 1000")
        assert lab.hosts[1].call("cat", "/proc/sys/kernel/hostname")
        own = namespaces_of(os.getpid())
        made = frozenset.union(*spaces) - own
        assert len(made) == 9
        assert processes_in(made)
    assert not processes_in(made)
    left = set(Path("/proc/self/mounts").read_text().splitlines()) - set(mounts)
    assert not [mount for mount in left if str(tmp_path) in mount]


def test_a_machine_without_the_rights_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotNetworkError, match="unshare is missing"):
        Lab(tmp_path / "lab")
