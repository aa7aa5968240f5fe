"""The way between two hosts as a test controls it: a relay of all TCP connections, and lost packets.

A relay stands between the switches. At one of them it has the address of the host that it leads to, which is at the
other; so clients see that host's own address, and have no other way to it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.faults.support.processes import LIMIT_S
from tests.network.support.hosts import Host, Lab, first_child

PROGRAM: Final = Path(__file__).with_name("relay_program.py")
OTHER: Final = {"lan": "wan", "wan": "lan"}
BACKS: Final = {"lan": "10.77.0.250", "wan": "10.77.0.251"}
"""Address at the switch of the host that a relay leads to."""
LOSS: Final = Path(__file__).with_name("packet_loss.py")


class RelayStats(msgspec.Struct):
    """Connections accepted so far and living now; bytes forwarded and, of these, changed."""

    accepted: int
    living: int
    forwarded: int
    changed: int


class Relay:
    """A relay in front of a host, for hosts at the other switch. It ends with the lab."""

    def __init__(self, lab: Lab, target: Host, *ports: int) -> None:
        self._lab = lab
        self._target = target
        self._ports: set[int] = set()
        self._process = subprocess.Popen(
            lab.inside(sys.executable, "-I", "-S", str(PROGRAM)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            legs = json.loads(self._answer())
            place = f"/proc/{first_child(self._process.pid)}/fd"
            self._front = f"{place}/{legs['front']}"
            self._address = target.address
            lab.plug(f"f-{target.name}", OTHER[target.switch], self._front, target.address)
            back = f"{place}/{legs['back']}"
            lab.plug(f"b-{target.name}", target.switch, back, BACKS[target.switch])
        except BaseException:
            self.close()
            raise
        lab.ending.append(self.close)
        self.listen(*ports)

    def listen(self, *ports: int) -> None:
        """Relay these ports of the target, at its present address."""
        if self._address != self._target.address:
            self._lab.change_address(self._front, self._address, self._target.address)
            self._address = self._target.address
        self._ports |= set(ports)
        self._do("listen", ports=sorted(self._ports), target=self._target.address)

    def set(self, **faults: Any) -> None:
        """Change `delay_s` (each way), `bytes_per_s` (of a connection), `stalled` or `corrupt_every` (bytes)."""
        self._do("set", **faults)

    def cut(self, *ports: int) -> None:
        """End all connections by RST, or those of some ports."""
        self._do("cut", ports=ports)

    def half_open(self, *ports: int) -> None:
        """Forward nothing any more on the present connections, and do not end them; new ones are served."""
        self._do("half_open", ports=ports)

    def stats(self) -> RelayStats:
        """Return the counters."""
        return self._do("stats")

    def close(self) -> None:
        """End it, and with it all connections."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(LIMIT_S)

    def _do(self, what: str, **about: Any) -> RelayStats:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **about}).encode() + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._answer(), type=RelayStats)

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the relay ended"
        return line


def lose_packets(host: Host, one_in: int) -> None:
    """Drop one in so many of the packets that reach a host, at random; 0 drops none any more."""
    host.tool(sys.executable, "-I", "-S", str(LOSS), str(one_in))
