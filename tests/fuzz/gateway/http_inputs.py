"""Hostile HTTP: requests of Atropos' clients with other lines, headers, framing and bodies, cut anywhere."""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
from tests.fuzz.mutations import mutate, some_edits
from tests.fuzz.values import mutated, replaced
from tests.services.gateway.site import ENVIRONMENT, TRAINER, scored

REQUESTS_LIMIT: Final = 4
MANY: Final = 40
"""Requests of a pipeline that is too long."""
CHUNK_BYTES: Final = 60_000
"""About what one read of a connection brings."""
METHODS: Final = (
    "GET",
    "POST",
    "HEAD",
    "OPTIONS",
    "PUT",
    "DELETE",
    "CONNECT",
    "TRACE",
    "PRI",
    "get",
    "X",
    "",
)
PATHS: Final = (
    "/", "/register", "/register-env", "/disconnect-env", "/wandb_info", "/info", "/status", "/status-env",
    "/scored_data", "/scored_data_list", "/latest_example", "/reset_data", "/batch", "/global-status", "/metrics",
    "/health", "/docs", "/openapi.json", *("/scored_data",) * 9, *("/scored_data_list",) * 3, *("/register-env",) * 2,
)  # fmt: skip
ODD_PATHS: Final = (
    "*", "//", "/%", "/%00", "/%ff%fe", "/..", "/t/", "/t/x", "/t//info", "/t/%ff/info", "/w/", "/w/x/info",
    "/w/x", "http://localhost/info", "localhost:80", "/status-env?env_id=0", "/status-env?env_id=%ff&env_id=1",
    "/status-env?env_id=9999999999999999999999", "/info?" + "a=b&" * 2000, "/é", "/info#x", "?", "",
    "/" + "a" * 3000, "/info ", "/status-env?env_id=" + "1" * 5000,
)  # fmt: skip
VERSIONS: Final = (
    "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.10", "http/1.1", "RTSP/1.0", "",
)  # fmt: skip
NAMES: Final = (
    "Host", "Content-Length", "Transfer-Encoding", "Content-Encoding", "Expect", "Origin", "Connection", "Upgrade",
    "Accept-Encoding", "Authorization", "Sec-Fetch-Site", "User-Agent", "Cookie", "Trailer", "TE", "X", "Content-Type",
)  # fmt: skip
VALUES: Final[dict[str, Sequence[str]]] = {
    "Host": (
        "localhost", "127.0.0.1:80", "[::1]:1", "[", "evil.example", "a.b.", "", "x" * 300, "localhost:port",
        "\xff", "..",
    ),
    "Content-Length": (
        "0", "1", "-1", "+5", "5 5", "5, 5", "0x10", "1e3", "18446744073709551616", "99999999999", "0" * 5000 + "2",
        "٣", "", " 7 ", "7\t",
    ),
    "Transfer-Encoding": (
        "chunked", "Chunked", "gzip, chunked", "chunked, gzip", "identity", "chunked, chunked", "\x0bchunked", "x", "",
    ),
    "Content-Encoding": ("gzip", "GZIP, gzip", "deflate", "identity", "br", "x-gzip", ""),
    "Expect": ("100-continue", "100-Continue", "200-ok", ""),
    "Origin": ("http://localhost", "http://evil.example", "null", "http://[", "file://", "http://127.0.0.1:80", "\xff"),
    "Connection": ("close", "keep-alive", "upgrade", "close, upgrade", "Upgrade, HTTP2-Settings", ""),
    "Upgrade": ("websocket", "h2c", "x"),
    "Accept-Encoding": ("gzip", "gzip;q=0", "*", "br, gzip"),
    "Authorization": ("Bearer x", "Bearer ", "bearer \xff", "Basic eDp4"),
    "Sec-Fetch-Site": ("cross-site", "same-origin", "none", "\xff"),
    "User-Agent": ("Mozilla/5.0", "x"),
}  # fmt: skip
COMMON: Final = ("", "x", "a\x00b", "a\tb", "\x01", "\x7f", "x" * 9000, "a,b;c=d", " ")
ABSURD_TEXTS: Final = (
    b"NaN", b"-Infinity", b"1e999", b"-1e999", b"1" + b"0" * 400, b"9" * 5000, b"-9" * 3, b"0123",
    b'"\\ud800"', b'"\\u0000"',
    b'"\xff"', b"[" * 2000 + b"]" * 2000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"[[" * 40, b"tru", b"[1,]",
    b'{"a":1,"a":2}',
    b'"' + b"x" * 20_000 + b'"', b"[" + b"[]," * 3000 + b"[]]", b"18446744073709551616", b"1.5e-400", b" ", b"",
    b'{"temperature":' + b"9" * 5000 + b"}", b'{"temperature":[]}',
)  # fmt: skip
HOLE: Final = "\x00hole\x00"
"""Text whose place an absurd one takes after the encoding."""


class Burst(NamedTuple):
    """What one client sends: pieces of bytes, each fed at once."""

    pieces: tuple[bytes, ...]

    @property
    def data(self) -> bytes:
        """Return all that is sent."""
        return b"".join(self.pieces)


def burst(rng: random.Random) -> Burst:
    """Return what a hostile client sends."""
    count = MANY if rng.random() < 0.02 else rng.randint(1, REQUESTS_LIMIT)
    data = b"".join(_request(rng) for _ in range(count))
    if rng.random() < 0.12:
        data = mutate(data, some_edits(rng, 4), (_request(rng), _request(rng)))
    return Burst(tuple(_pieces(data, rng)))


def _pieces(data: bytes, rng: random.Random) -> list[bytes]:
    if rng.random() < 0.5:
        cuts: list[int] = []
    elif len(data) < 400 and rng.random() < 0.3:
        cuts = list(range(1, len(data)))
    else:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 8)))
    edges = sorted({0, *cuts, *range(0, len(data), CHUNK_BYTES), len(data)})
    return [data[start:end] for start, end in pairwise(edges)]


def _request(rng: random.Random) -> bytes:
    path = rng.choice(PATHS) if rng.random() < 0.93 else rng.choice(ODD_PATHS)
    body = _body(path, rng)
    posts = bool(body) or path in {"/register", "/register-env", "/scored_data", "/disconnect-env"}
    method = ("POST" if posts else "GET") if rng.random() < 0.92 else rng.choice(METHODS)
    headers = [("Host", "localhost")] if rng.random() < 0.95 else []
    if rng.random() < 0.25 and body:
        body = _pressed(body, rng)
        headers.append(("Content-Encoding", "gzip"))
    framed, framing = _framed(body, rng)
    headers += framing
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2))):
        headers.insert(rng.randint(0, len(headers)), _header(rng))
    version = rng.choice(VERSIONS) if rng.random() < 0.06 else VERSIONS[0]
    end = "\r\n" if rng.random() < 0.98 else rng.choice(("\n", "\r", "\r\r\n", "\n\n"))
    lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return end.join(lines).encode("latin-1", "ignore" if path != "/é" else "replace") + framed


def _header(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    value = rng.choice(COMMON) if rng.random() < 0.15 else rng.choice(VALUES.get(name, COMMON))
    if rng.random() < 0.05:
        name = rng.choice((name + " ", " " + name, "", "a b", name.upper(), "x" * 500, "\xff", name + "\x00"))
    return name, value


def _framed(body: bytes, rng: random.Random) -> tuple[bytes, list[tuple[str, str]]]:
    """Return the body as it is sent, and the headers that frame it."""
    match rng.randrange(35):
        case 0:
            return body, []
        case 1:
            size = rng.choice((0, len(body) - 1, len(body) + 1, len(body) + 70_000, len(body) * 2))
            return body, [("Content-Length", str(max(0, size)))]
        case 2:
            length = ("Content-Length", str(len(body)))
            return body, [
                length,
                rng.choice((length, ("Content-Length", "1"), ("Transfer-Encoding", "chunked"))),
            ]
        case 3 | 4 | 5:
            return _chunked(body, rng), [("Transfer-Encoding", "chunked")]
        case 6:
            return b"", [("Content-Length", str(len(body))), ("Expect", "100-continue")]
        case 7:
            return body, [("Content-Length", "0" * rng.choice((1, 20, 4300, 5000)) + str(len(body)))]
        case _:
            return body, [("Content-Length", str(len(body)))] if body or rng.random() < 0.5 else []


def _chunked(body: bytes, rng: random.Random) -> bytes:
    parts, at = [], 0
    while at < len(body):
        size = rng.choice((1, 7, 100, 20_000))
        part = body[at : at + size]
        at += size
        count = rng.choice((b"%x", b"%X", b"0%x", b"%x;ext=1")) % len(part)
        parts.append(count + b"\r\n" + part + b"\r\n")
        if len(parts) > 200:
            parts.append(b"%x\r\n%b\r\n" % (len(body) - at, body[at:]) if at < len(body) else b"")
            break
    trailer = rng.choice(
        (
            b"",
            b"",
            b"X: 1\r\n",
            b"Content-Encoding: gzip\r\n",
            b"Host: evil.example\r\n",
            b"Content-Length: 5\r\n",
        )
    )
    whole = b"".join(parts) + b"0\r\n" + trailer + b"\r\n"
    if rng.random() < 0.15:
        bad = (b"-1\r\n", b"ffffffffffffffffff\r\n", b"5\n", b"\r\n", b"g\r\n", b"0\r\n\r\n")
        whole = rng.choice(bad) + whole
    return whole


def _pressed(body: bytes, rng: random.Random) -> bytes:
    """Return the body as gzip, perhaps of several members, or damaged, or of another kind."""
    whole = gzip.compress(body, mtime=0)
    match rng.randrange(10):
        case 0:
            return mutate(whole, some_edits(rng, 3), (whole,))
        case 1:
            return whole + gzip.compress(b"", mtime=0) * rng.choice((1, 20, 5000))
        case 2:
            return whole + rng.choice((b"\0" * 100, b"x", whole[:9], whole))
        case 3:
            return gzip.compress(bytes(rng.choice((1 << 20, 12 << 20))), mtime=0)
        case 4:
            return zlib.compress(body)
        case 5:
            return whole[:-8] + rng.randbytes(8)
        case _:
            return whole


def _body(path: str, rng: random.Random) -> bytes:
    make = _BODIES.get(path)
    if make is None:
        return b"" if rng.random() < 0.9 else b"{}"
    value = make(rng)
    if rng.random() < 0.3:
        return msgspec.json.encode(value)
    if rng.random() < 0.15:
        return mutate(msgspec.json.encode(value), some_edits(rng, 4), ABSURD_TEXTS)
    if isinstance(value, dict) and rng.random() < 0.2:  # a part that may be anything
        return _json({**value, rng.choice(("images", "generation_params", "unknown")): HOLE}, rng)
    if rng.random() < 0.5:
        return _json(replaced(value, rng, HOLE), rng)
    for _ in range(rng.randint(1, 3)):
        value = mutated(value, rng)
    return _json(value, rng)


def _json(value: Any, rng: random.Random) -> bytes:
    """Encode a value; its holes become texts that no encoder writes."""
    try:
        text = msgspec.json.encode(value, enc_hook=str)
    except (OverflowError, TypeError):  # an integer beyond 64 bits, or a key that is no text
        text = json.dumps(value, default=str, skipkeys=True).encode()
    hole = msgspec.json.encode(HOLE)
    while hole in text:
        text = text.replace(hole, rng.choice(ABSURD_TEXTS), 1)
    return text


def _posted(rng: random.Random) -> dict[str, Any]:
    sequences = rng.choice((1, 2, 2, 5))
    one = scored(rng.randrange(1000), sequences)
    extra: dict[str, Any] = {
        "env_id": rng.choice((None, 0, 1, 2, 77)),
        "advantages": [[0.5, 1.0]] * sequences,
        "inference_logprobs": [[-0.5, -1.0]] * sequences,
        "ref_logprobs": [[-0.5, -1.0]] * sequences,
        "distill_token_ids": [[[1, 2], [3]]] * sequences,
        "distill_logprobs": [[[-0.1, -0.2], [-0.3]]] * sequences,
        "messages": [[{"role": "user", "content": "3 1 2"}]] * sequences,
        "generation_params": {"temperature": 0.7},
        "group_overrides": {"temperature": 1.5, "x": [1, {"y": None}]},
        "overrides": [{"temperature": 0.5}] * sequences,
        "images": "x" * rng.choice((1, 1000, 40_000)),
    }
    for name in rng.sample(sorted(extra), rng.randint(0, 4)):
        one[name] = extra[name]
    return one


_BODIES: Final[dict[str, Callable[[random.Random], Any]]] = {
    "/register": lambda rng: {**TRAINER, "batch_size": rng.choice((1, 2, 4))},
    "/register-env": lambda rng: {**ENVIRONMENT, "desired_name": rng.choice(("maths", "\u00e9", "a b"))},
    "/disconnect-env": lambda rng: {"env_id": rng.randrange(3)},
    "/status-env": lambda rng: {"env_id": rng.randrange(3)},
    "/scored_data": _posted,
    "/scored_data_list": lambda rng: [_posted(rng) for _ in range(rng.randint(0, 3))],
}
