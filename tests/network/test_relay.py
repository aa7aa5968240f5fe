"""The relay does to connections what its commands say, and nothing else."""

import sys
from typing import Final

import msgspec
import pytest
from tests.faults.support.processes import wait_until
from tests.network.support import relay as relays
from tests.network.support.hosts import CannotNetworkError, Host, Lab, Program
from tests.network.support.relay import Relay, lose_packets

PORT: Final = 7000
MIB: Final = 1 << 20
ECHO: Final = """
import asyncio

async def echo(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()

async def main():
    server = await asyncio.start_server(echo, "0.0.0.0", 7000)
    print("up", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
TALK: Final = """
import hashlib, json, socket, sys, threading, time

nbytes = int(sys.argv[1])
line = socket.create_connection(("server", 7000))
sent, got, began = bytes(range(256)) * (nbytes // 256), b"", time.monotonic()
threading.Thread(target=line.sendall, args=(sent,)).start()
first = 0.0
while len(got) < len(sent):
    try:
        data = line.recv(1 << 20)
    except OSError as error:
        print(json.dumps({"error": type(error).__name__}), flush=True)
        break
    if not data:
        print(json.dumps({"error": "end"}), flush=True)
        break
    first = first or time.monotonic() - began
    got += data
else:
    wrong = sum(a != b for a, b in zip(sent, got)) if sent != got else 0
    print(json.dumps({"first_s": first, "took_s": time.monotonic() - began, "wrong": wrong}), flush=True)
"""
HOLD: Final = """
import socket
line = socket.create_connection(("server", 7000))
line.sendall(b"x")
line.recv(1)
print("held", flush=True)
try:
    print(f"got {line.recv(1)}", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


class Talk(msgspec.Struct):
    """What a client saw: the time of the first byte and of all, wrong bytes, or how it ended."""

    first_s: float = 0.0
    took_s: float = 0.0
    wrong: int = 0
    error: str = ""


@pytest.fixture
def way(lab: Lab) -> tuple[Relay, Host, Host]:
    server, client = lab.host("server", 1), lab.host("client", 2, "wan")
    echo = server.start("echo", sys.executable, "-c", ECHO, answers=True)
    assert read(echo) == "up"
    return Relay(lab, server, PORT), client, server


def read(program: Program) -> str:
    assert program.process.stdout is not None
    return program.process.stdout.readline().decode().strip()


def talk(client: Host, nbytes: int) -> Talk:
    return msgspec.json.decode(client.call(sys.executable, "-c", TALK, str(nbytes)), type=Talk)


def held(client: Host) -> Program:
    """Return a client that waits on its connection."""
    program = client.start("hold", sys.executable, "-c", HOLD, answers=True)
    assert read(program) == "held"
    return program


def test_it_forwards_every_byte(way: tuple[Relay, Host, Host]) -> None:
    relay, client, _ = way
    assert talk(client, 8 * MIB).wrong == 0
    assert relay.stats().forwarded == 16 * MIB
    wait_until(lambda: relay.stats().living == 0, "the end of the connection")


def test_a_delay_holds_back_no_bytes_behind(way: tuple[Relay, Host, Host]) -> None:
    relay, client, _ = way
    relay.set(delay_s=0.2)
    heard = talk(client, 8 * MIB)
    assert heard.first_s >= 0.4
    # One chunk of the relay at a time would take 51 s.
    assert heard.took_s - heard.first_s < 20
    assert heard.wrong == 0


def test_a_rate_bounds_a_connection(way: tuple[Relay, Host, Host]) -> None:
    relay, client, _ = way
    relay.set(bytes_per_s=2 * MIB)
    assert talk(client, 2 * MIB).took_s >= 0.9


def test_a_cut_resets(way: tuple[Relay, Host, Host]) -> None:
    relay, client, _ = way
    program = held(client)
    relay.cut()
    assert read(program) == "ConnectionResetError"
    assert talk(client, 256).wrong == 0


def test_a_half_open_connection_is_silent_in_both_directions(way: tuple[Relay, Host, Host]) -> None:
    relay, client, server = way
    program = held(client)
    relay.half_open()
    assert talk(client, 256).wrong == 0  # new connections are served
    program.kill()
    assert established(server) == 1  # the server learns nothing of the client's end
    relay.cut()
    wait_until(lambda: established(server) == 0, "the reset")


def established(host: Host) -> int:
    lines = host.call("cat", "/proc/net/tcp").splitlines()[1:]
    return sum(line.split()[3] == "01" for line in lines)


def test_a_stall_loses_nothing(way: tuple[Relay, Host, Host]) -> None:
    relay, client, _ = way
    relay.set(stalled=True)
    told = client.start("talk", sys.executable, "-c", TALK, str(4 * MIB), answers=True)
    wait_until(lambda: relay.stats().accepted, "the connection")
    assert relay.stats().forwarded == 0
    relay.set(stalled=False)
    assert msgspec.json.decode(read(told), type=Talk).wrong == 0
    told.wait()


def test_it_changes_one_byte_in_so_many(way: tuple[Relay, Host, Host]) -> None:
    relay, client, _ = way
    relay.set(corrupt_every=64 << 10)
    heard = talk(client, 4 * MIB)
    changed = relay.stats().changed
    assert 0 < heard.wrong <= changed  # one may be changed both ways
    assert 64 < changed < 256  # 128 on average
    relay.set(corrupt_every=0)
    assert talk(client, MIB).wrong == 0


def test_lost_packets_are_sent_again(lab: Lab) -> None:
    server, client = lab.host("server", 1), lab.host("client", 2)
    echo = server.start("echo", sys.executable, "-c", ECHO, answers=True)
    assert read(echo) == "up"
    try:
        lose_packets(server, 10)
    except CannotNetworkError as error:
        pytest.skip(f"this kernel drops no packets at random: {error}")
    before = retransmitted(client)
    assert talk(client, 16 * MIB).wrong == 0
    assert retransmitted(client) > before
    lose_packets(server, 0)
    before = retransmitted(client)
    assert talk(client, MIB).wrong == 0
    assert retransmitted(client) < before + 5  # a late one of the connection before may be among them


def retransmitted(host: Host) -> int:
    names, values = [
        line.split()
        for line in host.tool("cat", "/proc/self/net/snmp").splitlines()
        if line.startswith("Tcp:")
    ]
    return int(values[names.index("RetransSegs")])


def test_the_relay_ends_with_the_lab(lab: Lab) -> None:
    relay = Relay(lab, lab.host("server", 1), PORT)
    assert relay.stats() == relays.RelayStats(0, 0, 0, 0)
