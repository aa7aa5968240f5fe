"""Hosts on a network of their own: namespaces of this kernel that share nothing but two switches.

A `Lab` has two switches, `lan` and `wan`. Each `Host` is plugged into one of them. It has its own network, mounts,
process ids and System V memory, and an empty /tmp, /dev/shm and home. The repository and the virtual environment are
there at the same place, read-only, and no other file of the caller. So a path that leaks from one host to the other
is found missing.

Everything ends with the lab: its first process is the first of a process namespace, and the kernel ends with it all
others, and the network devices and mounts that only they had. Root needs nothing else; another user needs a kernel that
allows user namespaces.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.faults.support.processes import LIMIT_S, wait_until

ROOT: Final = Path(__file__).parents[3]
INIT: Final = Path(__file__).with_name("host_init.py")
HOME: Final = "/home/host"
SWITCHES: Final = ("lan", "wan")
PREFIX: Final = 16
"""Bits of the network's part of each address: all hosts of both switches are in one network, 10.77.0.0."""
LOOK_S: Final = 20.0
"""Time within which a host starts."""


class CannotNetworkError(Exception):
    """This machine does not let this user make hosts."""


def run(command: Sequence[str]) -> str:
    """Run a tool; CannotNetworkError with its message if it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except FileNotFoundError as error:
        raise CannotNetworkError(f"{command[0]} is missing: {error}") from None
    if done.returncode:
        raise CannotNetworkError(f"{' '.join(command[-6:])}: {done.stderr.strip()}")
    return done.stdout


def first_child(pid: int) -> int:
    """Return the process that another one has forked, once it has."""
    place = Path(f"/proc/{pid}/task/{pid}/children")
    return int(wait_until(lambda: place.read_text().split(), f"a child of process {pid}", LOOK_S)[0])


class Program:
    """A command that runs on a host. Its output goes to a log, and what it reads comes from the test.

    Attributes:
        log: File with its standard error, and its standard output unless `answers` is set.
    """

    def __init__(self, host: "Host", command: Sequence[str], log: Path, *, answers: bool = False) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                host.inside(*command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else output,
                stderr=output,
                env=host.environment,
                bufsize=0,
            )
        self.host = host

    @property
    def pid(self) -> int:
        """Process id outside of the host."""
        return first_child(self.process.pid)

    def memory_bytes(self) -> int:
        """Return the most resident memory that it ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, without waiting; nothing happens if it has ended."""
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and wait until it is gone. May be called twice."""
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> int:
        """End it in order and return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait until it has ended and return its exit code."""
        code = self.process.wait(limit_s)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def living(self) -> bool:
        """Return whether it has not ended."""
        return self.process.poll() is None

    def text(self) -> str:
        """Return its log."""
        return self.log.read_text(errors="replace")

    def expect(self, met: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until a condition holds; fail if the program ends first."""

        def look() -> bool:
            done = bool(met())
            assert done or self.living(), f"it ended before {what}: {self.text()[-3000:]}"
            return done

        wait_until(look, f"{what}: {self.text()[-3000:]}", limit_s)


class Host:
    """One host. Make it with `Lab.host`."""

    def __init__(self, lab: "Lab", name: str, address: str, switch: str) -> None:
        self.name = name
        self.address = address
        self.switch = switch
        self.tmp = lab.place / name / "tmp"
        """The host's /tmp, as this process sees it."""
        self.logs = lab.place / name / "logs"
        self.programs: list[Program] = []
        self._lab = lab
        for folder in (self.tmp, self.logs, lab.place / name / "root"):
            folder.mkdir(parents=True)
        (lab.place / name).chmod(0o700)
        told = {
            "root": str(lab.place / name / "root"),
            "tmp": str(self.tmp),
            "hosts": str(lab.names),
            "shared": [str(path) for path in shared_paths()],
        }
        init = (sys.executable, "-I", "-S", str(INIT), json.dumps(told))
        apart = ("unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--")
        self._process = subprocess.Popen(
            lab.inside(*apart, *init), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            if self._process.stdout.readline() != b"ready\n":
                raise CannotNetworkError(self._process.stderr.read().decode()[-1000:])
            # nsenter has forked unshare, because it entered a process namespace, and unshare has forked the first.
            self.pid = first_child(first_child(self._process.pid))
            lab.plug(name, switch, f"/proc/{self.pid}/ns/net", address)
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Environment of its programs: nothing of the caller's own."""
        kept = {name: value for name, value in os.environ.items() if name in {"OMP_NUM_THREADS", "LANG"}}
        return {
            **kept,
            "PATH": f"{ROOT / '.venv' / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": HOME,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MPLCONFIGDIR": "/tmp/matplotlib",
        }

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one on this host."""
        spaces = ("--net", "--mount", "--pid", "--ipc")
        at_home = ("sh", "-c", 'cd "$HOME" && exec "$@"', "sh")
        return ["nsenter", "-t", str(self.pid), *self._lab.user, *spaces, "--", *at_home, *command]

    def tool(self, *command: str) -> str:
        """Run a tool of the system in this host's network and return its output."""
        return self._lab.tool(*command, network=f"/proc/{self.pid}/ns/net")

    def start(self, name: str, *command: str, answers: bool = False) -> Program:
        """Start a program. `answers`: the test reads its standard output."""
        program = Program(self, command, self.logs / f"{name}.log", answers=answers)
        self.programs.append(program)
        return program

    def python(self, name: str, module: str, *arguments: str, answers: bool = False) -> Program:
        """Start a module of Python."""
        return self.start(name, sys.executable, "-m", module, *arguments, answers=answers)

    def call(self, *command: str) -> str:
        """Run a program to its end and return its output; AssertionError if it fails."""
        done = subprocess.run(
            self.inside(*command),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}{done.stdout[-3000:]}"
        return done.stdout

    def unplug(self) -> None:
        """Pull the cable: packets are lost both ways, and no connection ends."""
        self._lab.tool("ip", "link", "set", f"p-{self.name}", "down")

    def plug_in(self) -> None:
        """Put the cable back."""
        self._lab.tool("ip", "link", "set", f"p-{self.name}", "up")

    def move_to(self, address: str) -> None:
        """Give the host another address in place of its own; its connections stall."""
        self._lab.change_address(f"/proc/{self.pid}/ns/net", self.address, address)
        self.address = address
        self._lab.write_names()

    def close(self) -> None:
        """End all programs of this host, and the host."""
        for program in self.programs:
            program.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(LIMIT_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class Lab:
    """Switches and hosts; everything ends with it.

    Args:
        place: Directory for the files of the hosts. /tmp of host `a` is `place / "a" / "tmp"`.
        as_user: Make a user namespace, as whoever is not root must.
    """

    def __init__(self, place: Path, *, as_user: bool = os.geteuid() != 0) -> None:
        self.place = place
        self.user: tuple[str, ...] = ()
        """Options of nsenter that give the rights of the lab."""
        self.names = place / "names"
        self.hosts: list[Host] = []
        self.ending: list[Callable[[], None]] = []
        """Called before the hosts end."""
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.write_names()
        new_user = ("--user", "--map-root-user") if as_user else ()
        apart = ("unshare", *new_user, "--net", "--mount", "--pid", "--fork", "--kill-child", "--")
        try:
            self._process = subprocess.Popen(
                [*apart, "sh", "-c", "mount -t proc proc /proc && echo ready && exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise CannotNetworkError("unshare is missing") from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            if self._process.stdout.readline() != b"ready\n":
                raise CannotNetworkError(self._process.stderr.read().decode().strip())
            self.pid = first_child(self._process.pid)
            self.network = f"/proc/{self.pid}/ns/net"
            if as_user:
                self.user = ("--preserve-credentials", f"--user=/proc/{self.pid}/ns/user")
            for switch in SWITCHES:
                self.tool("ip", "link", "add", switch, "type", "bridge")
                self.tool("ip", "link", "set", switch, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one in the lab, outside of every host."""
        spaces = ("--net", "--mount", "--pid")
        return ["nsenter", "-t", str(self.pid), *self.user, *spaces, "--", *command]

    def tool(self, *command: str, network: str = "") -> str:
        """Run a tool of the system in a network, by default that of the switches, and return its output."""
        return run(["nsenter", *self.user, f"--net={network or self.network}", "--", *command])

    def plug(self, name: str, switch: str, network: str, address: str) -> None:
        """Join a network namespace to a switch: there by the port `p-NAME`, here as `eth0` with the address."""
        port, end = f"p-{name}", f"e-{name}"
        self.tool("ip", "link", "add", port, "type", "veth", "peer", "name", end)
        self.tool("ip", "link", "set", end, "netns", network)
        self.tool("ip", "link", "set", port, "master", switch, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("link", "set", end, "name", "eth0"),
            ("address", "add", f"{address}/{PREFIX}", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            self.tool("ip", *command, network=network)

    def change_address(self, network: str, old: str, new: str) -> None:
        """Give a network namespace another address at its switch."""
        self.tool("ip", "address", "del", f"{old}/{PREFIX}", "dev", "eth0", network=network)
        self.tool("ip", "address", "add", f"{new}/{PREFIX}", "dev", "eth0", network=network)

    def host(self, name: str, number: int, switch: str = "lan") -> Host:
        """Start a host with the address 10.77.0.NUMBER; its name stands in /etc/hosts of all."""
        host = Host(self, name, f"10.77.0.{number}", switch)
        self.hosts.append(host)
        self.write_names()
        return host

    def write_names(self) -> None:
        """Write /etc/hosts of all hosts anew; the file stays the same one, because it is mounted."""
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        self.names.write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        """End all hosts and the lab, and check that nothing of them is left."""
        with ExitStack() as stack:
            stack.callback(self._end)
            for host in self.hosts:
                stack.callback(host.close)
            for end in self.ending:
                stack.callback(end)

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait(LIMIT_S)


def shared_paths() -> list[Path]:
    """Return the directories of the caller that each host has too: repository, environment and interpreter."""
    wanted = {ROOT, (ROOT / ".venv").resolve(), Path(sys.prefix), Path(sys.base_prefix)}
    found = {path.resolve() for path in wanted if path.exists()}
    return [path for path in found if not path.is_relative_to("/usr")]


def namespaces_of(pid: int) -> frozenset[str]:
    """Return the namespaces of a process, as the kernel names them."""
    return frozenset(
        str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "mnt", "pid_for_children")
    )


def processes_in(spaces: frozenset[str]) -> list[int]:
    """Return the processes that live in one of these namespaces."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if namespaces_of(int(entry.name)) & spaces:
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended, or belongs to another user
    return found


@cache
def problem() -> str:
    """Return why this user cannot make hosts here; empty if they can."""
    try:
        with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
            lab.host("a", 1).call("true")
    except CannotNetworkError as error:
        return str(error)
    return ""
