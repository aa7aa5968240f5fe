"""A producer and a trainer in some 60 lines without this package: what a client in another language has to do.

    rolloutmq broker --run-dir runs/wire
    python examples/clients/wire_client.py runs/wire

It uses ZeroMQ, msgpack and CRC-32C. docs/reference/protocol.md explains every field.
"""

import hashlib
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import google_crc32c
import zmq
from msgspec.msgpack import decode, encode  # plain msgpack of dicts and lists

PROTOCOL, TRAIN, BOOL, I32, F64 = 4, 0, 0, 5, 12
TABLE = [[["tokens", I32, 1, ""], ["mask", BOOL, 1, "tokens"], ["scores", F64, 0, ""]]]


def ask(serve: zmq.Socket[bytes], kind: str, **fields: Any) -> tuple[dict[str, Any], list[bytes]]:
    """Send a request; return the reply and the frames behind it."""
    serve.send(encode({"kind": kind, **fields}))
    reply, *frames = serve.recv_multipart()
    answer = decode(reply)
    if answer["kind"] == "error":
        raise SystemExit(f"{kind}: {answer['code']}: {answer['detail']}")
    return answer, frames


def body(rows: list[list[int]], scores: list[float]) -> bytes:
    """Encode a group: a directory of blocks, then each block at a multiple of 64. All tokens are trained on."""
    n, tokens = len(rows), [token for row in rows for token in row]
    blocks = [
        struct.pack(f"<{n}I", *map(len, rows)),
        struct.pack(f"<{len(tokens)}i", *tokens),
        b"\1" * len(tokens),
        struct.pack(f"<{n}d", *scores),
    ]
    directory, data = b"", b""
    for block in blocks:
        data += bytes(-(len(blocks) * 24 + len(data)) % 64)
        directory += struct.pack("<3Q", 0, len(blocks) * 24 + len(data), len(block))
        data += block
    return directory + data


def main(run_dir: Path) -> None:
    at = json.loads((run_dir / "endpoints.json").read_text())
    context = zmq.Context()
    serve, ingest = context.socket(zmq.REQ), context.socket(zmq.PUSH)
    serve.connect(at["serve"])
    ingest.connect(at["ingest"])

    opened, _ = ask(serve, "register_producer", producer="p", env="wire", group_size=2, protocol=PROTOCOL)
    session = opened["ack"]["session"]
    ask(serve, "declare_tables", producer="p", session=session, tables=[TABLE])
    frame, table = body([[1, 2, 3], [4, 5]], [0.0, 1.0]), hashlib.blake2b(encode(TABLE), digest_size=8)
    never, rewards = [0, 0], [0.5, 0.0, 1.0, 0.5]
    header = [1, len(frame), f"group-{time.time_ns()}", table.hexdigest(), 1, len(frame)]
    header += [google_crc32c.value(frame), 2, 5, never, never, 0.0, 0.0, rewards]
    ingest.send_multipart([encode([PROTOCOL, "p", session, "default", "wire", TRAIN, [header]]), frame])

    registered, _ = ask(serve, "register_consumer", consumer="t", protocol=PROTOCOL)
    life, step = registered.get("policy", [0, 0])  # fields with their default are left out
    asked = {"version": [life, step], "step": step + 1, "sequences": 2, "request_id": f"r{time.time_ns()}"}
    batch, frames = ask(serve, "pull", consumer="t", **asked)
    group_id = batch["groups"][0]["header"][2]
    _, start, length = struct.unpack_from("<3Q", frames[0], 24)  # the second block: the tokens
    tokens = struct.unpack_from(f"<{length // 4}i", frames[0], start)
    lease = {"lease": batch["lease"], "generation": batch["generation"]}
    ask(serve, "settle", consumer="t", **lease, version=[life, step + 1], trained=[group_id])
    ask(serve, "goodbye", producer="p", session=session, produced=1)
    sys.stdout.write(f"trained on {group_id}: tokens {list(tokens)}\n")
    context.destroy(linger=1000)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
