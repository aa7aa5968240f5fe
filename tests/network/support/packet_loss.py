"""Drop one in N of all incoming packets of this network namespace, at random.

    python -I -S packet_loss.py N

It asks the kernel over netlink for the rule `numgen random mod N 0 drop` of nftables, as `nft` would, which few
machines have. 0 removes the rule.
"""

import errno
import os
import socket
import struct
import sys
from typing import Final

NETLINK_NETFILTER: Final = 12
SUBSYSTEM: Final = 10 << 8
BATCH_BEGIN, BATCH_END = 16, 17
NEW_TABLE, DELETE_TABLE, NEW_CHAIN, NEW_RULE = (SUBSYSTEM | number for number in (0, 2, 3, 6))
REQUEST, ACK, CREATE, APPEND = 0x1, 0x4, 0x400, 0x800
IPV4: Final = 2
LOCAL_IN: Final = 1
NESTED: Final = 0x8000
TABLE: Final = b"loss\0"
CHAIN: Final = b"input\0"
REGISTER: Final = 8
"""NFT_REG32_00."""
VERDICT_REGISTER, DROP = 0, 0
NUMGEN_RANDOM, CMP_EQUAL = 1, 0
LIMIT_S: Final = 10.0


def attribute(kind: int, value: bytes | int) -> bytes:
    """Return an attribute; numbers are 32 bits in network order."""
    data = struct.pack(">I", value) if isinstance(value, int) else value
    return (struct.pack("=HH", 4 + len(data), kind) + data).ljust((7 + len(data)) // 4 * 4, b"\0")


def nest(kind: int, *parts: bytes) -> bytes:
    """Return an attribute of attributes."""
    return attribute(kind | NESTED, b"".join(parts))


def expression(name: bytes, *parts: bytes) -> bytes:
    """Return one expression of a rule."""
    return nest(1, attribute(1, name + b"\0"), nest(2, *parts))


def message(kind: int, flags: int, number: int, family: int, resource: int, body: bytes = b"") -> bytes:
    """Return a message of netfilter."""
    payload = struct.pack(">BBH", family, 0, resource) + body
    return struct.pack("=IHHII", 16 + len(payload), kind, REQUEST | flags, number, 0) + payload


def chain() -> bytes:
    """Return the chain that sees all packets for this host."""
    hook = nest(4, attribute(1, LOCAL_IN), attribute(2, 0))
    return attribute(1, TABLE) + attribute(3, CHAIN) + hook + attribute(7, b"filter\0")


def rule(one_in: int) -> bytes:
    """Return the rule that drops one in so many."""
    draw = expression(
        b"numgen", attribute(1, REGISTER), attribute(2, one_in), attribute(3, NUMGEN_RANDOM), attribute(4, 0)
    )
    compare = expression(
        b"cmp", attribute(1, REGISTER), attribute(2, CMP_EQUAL), nest(3, attribute(1, struct.pack("=I", 0)))
    )
    drop = expression(b"immediate", attribute(1, VERDICT_REGISTER), nest(2, nest(2, attribute(1, DROP))))
    return attribute(1, TABLE) + attribute(2, CHAIN) + nest(4, draw, compare, drop)


def apply(*messages: tuple[int, int, bytes]) -> None:
    """Send messages as one batch; OSError if the kernel refuses one."""
    batch = message(BATCH_BEGIN, 0, 0, 0, 10)
    for number, (kind, flags, body) in enumerate(messages, 1):
        batch += message(kind, flags | ACK, number, IPV4, 0, body)
    batch += message(BATCH_END, 0, len(messages) + 1, 0, 10)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as kernel:
        kernel.bind((0, 0))
        kernel.settimeout(LIMIT_S)
        kernel.send(batch)
        for _ in messages:
            answer = kernel.recv(1 << 16)
            (number,) = struct.unpack_from("=i", answer, 16)
            if number:
                raise OSError(-number, f"netfilter: {os.strerror(-number)}")


def main(one_in: int) -> None:
    try:
        apply((DELETE_TABLE, 0, attribute(1, TABLE)))
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
    if one_in:
        apply(
            (NEW_TABLE, CREATE, attribute(1, TABLE)),
            (NEW_CHAIN, CREATE, chain()),
            (NEW_RULE, CREATE | APPEND, rule(one_in)),
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
