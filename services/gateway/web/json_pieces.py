"""Large JSON values, bounded before they are decoded, and decoded piece by piece. Pure.

A decoder holds the interpreter until it is done, and two bytes of JSON can become a list of sixty. So a large text is
first cut at the commas of its outermost list or map, with numpy, which does not hold the interpreter. Lists of numbers
are decoded in pieces of `PIECE_BYTES` straight into arrays. Everything else counts its separators first: they bound the
number of values.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.encoding.opaque_columns import VALUES_LIMIT
from rolloutmq.schemas.errors import GroupTooLargeError, InvalidGroupError
from rolloutmq.schemas.group import Column
from rolloutmq.schemas.wire.envelope import SEQUENCES_LIMIT

PIECE_BYTES: Final = 64 << 10
"""Text decoded at once: a millisecond or two."""
CONTAINERS_LIMIT: Final = 1 << 16
"""Most lists and maps in all fields of a group that are no numbers; each takes as long as twenty numbers."""
OTHERS_LIMIT: Final = VALUES_LIMIT // 4
"""Most commas and colons in them."""
MEMBERS_LIMIT: Final = SEQUENCES_LIMIT
"""Most members of an outermost list or map: sequences, groups, fields."""
NUMBER_BYTES: Final = 4
"""Fewest bytes of a number in a column."""
Text = bytes | bytearray | memoryview
Places = NDArray[np.int64]
_CHUNK_BYTES: Final = 1 << 20
_DECODERS: Final[dict[Any, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind, strict=False)
    for kind in (list[int], list[float], list[list[int]], list[list[float]])
}
_STEPS: Final = np.zeros(256, np.int32)
"""Change of the depth by a character."""
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_BRACKET_BITS: Final = 0x26
"""Bits in which brackets and braces differ; with all of them set each is `_BRACKET`, and few other characters are."""
_BRACKET: Final = 0x7F
_SPACE: Final = b" \n\r\t"
_EDGE_BYTES: Final = 4096


class Separators(NamedTuple):
    """Separators of a text."""

    containers: int
    """Openings of lists and maps."""
    others: int
    """Commas and colons."""


def separators_of(text: Text, *, exact: bool) -> Separators:
    """Count the separators of JSON; without `exact` also those in strings, which is several times faster."""
    containers = others = 0
    for chunk in (plain for plain, _ in _plain_chunks(text)) if exact else _chunks(text):
        containers += int(np.count_nonzero(chunk == ord("{"))) + int(np.count_nonzero(chunk == ord("[")))
        others += int(np.count_nonzero(chunk == ord(","))) + int(np.count_nonzero(chunk == ord(":")))
    return Separators(containers, others)


def require_few_values(texts: Mapping[str, Text], most_bytes: int) -> None:
    """Check that the values of all texts, by the names of their columns, are not too many to decode.

    Raises:
        GroupTooLargeError: Their texts are twice as long as a group may be; escapes make them longer than their values.
        InvalidGroupError: There are too many.
    """
    if (size := sum(map(len, texts.values()))) > 2 * most_bytes:
        raise GroupTooLargeError(size, most_bytes)
    large = [text for text in texts.values() if len(text) > PIECE_BYTES]
    for exact in (False, True):
        found = [separators_of(text, exact=exact) for text in large]
        containers, others = sum(one.containers for one in found), sum(one.others for one in found)
        if containers <= CONTAINERS_LIMIT and others <= OTHERS_LIMIT:
            return
    raise InvalidGroupError(
        max(texts, key=lambda name: len(texts[name])),
        f"has too many values (got {containers} lists and maps, {others} commas and colons; "
        f"at most {CONTAINERS_LIMIT} and {OTHERS_LIMIT} are allowed)",
    )


def number_column(name: str, text: Text, kind: type, depth: int, most_bytes: int) -> Column:
    """Decode lists of numbers into a column, without a list of all of them.

    Args:
        name: Name of the column, for errors.
        text: `[n][length]` or `[n][length][k]` as JSON.
        kind: `int` or `float`.
        depth: 1 or 2.
        most_bytes: Limit of the group.

    Raises:
        GroupTooLargeError: The column alone exceeds the limit.
        InvalidGroupError: An integer is too large, or there are too many rows.
        msgspec.DecodeError: The text is no JSON, or has another shape or other values.
    """
    if (least := separators_of(text, exact=False).others * NUMBER_BYTES) > most_bytes:
        raise GroupTooLargeError(least, most_bytes)
    shape: Any = list[kind] if depth == 1 else list[list[kind]]  # type: ignore[valid-type]
    columns: list[Column] = []
    rows: list[int] = []
    for row in elements(text, name):
        pieces = [_DECODERS[shape].decode(piece) for piece in _pieces(bytes(row), depth)]
        if len(pieces) > 1 and not all(pieces):
            raise msgspec.DecodeError("JSON is malformed: nothing before or behind a comma")
        columns += [Column.build(name, piece, depth - 1) for piece in pieces]
        rows.append(sum(map(len, pieces)))
    arrays = [one.values for one in columns if one.values.size]
    if {array.dtype.str for array in arrays} - {"<i4", "<i8", "<f8"}:
        raise InvalidGroupError(name, "its integers fit no common 64-bit type")
    as_tokens = kind is int and depth == 1  # the type of a column without numbers depends on its name
    flat = Column.build("tokens" if as_tokens else name, np.concatenate(arrays) if arrays else [], 0)
    return Column(flat.dtype, flat.values, _lengths(columns, rows, depth))


def _lengths(columns: list[Column], rows: list[int], depth: int) -> tuple[NDArray[np.uint32], ...]:
    outer = np.fromiter(rows, np.uint32, len(rows))
    if depth == 1:
        return (outer,)
    cells = [one.lengths[0] for one in columns]
    return outer, np.concatenate(cells) if cells else np.empty(0, np.uint32)


def _pieces(row: bytes, depth: int) -> Iterator[bytes]:
    """Cut a list into lists of about `PIECE_BYTES`, behind a number or, at depth 2, behind a list."""
    at, end = 1, len(row) - 1
    while row.startswith(b"[") and end - at > PIECE_BYTES:
        near = at + PIECE_BYTES
        cut = row.find(b",", near if depth == 1 else row.find(b"]", near), end)
        if cut < 0:
            break
        yield b"[%b]" % row[at:cut]
        at = cut + 1
    yield row if at == 1 else b"[%b" % row[at:]


def elements(text: Text, name: str) -> list[memoryview]:
    """Return the texts of the elements of a list; they need not be JSON.

    Raises:
        msgspec.ValidationError: It is no list.
        msgspec.DecodeError: It does not end, or goes on behind its end.
        InvalidGroupError: There are too many elements.
    """
    return [member for member, _ in _members(text, b"[", name)]


def fields(text: Text) -> dict[str, memoryview]:
    """Return the texts of the values of a map; they need not be JSON. The last of several with one key counts.

    Raises:
        As `elements`.
    """
    found = {}
    for member, colon in _members(text, b"{", "body"):
        if colon < 0:
            raise msgspec.DecodeError("JSON is malformed: expected ':'")
        key = msgspec.json.decode(member[:colon], type=str)
        found[key] = _stripped(member[colon + 1 :])
    return found


def _members(text: Text, opening: bytes, name: str) -> Iterator[tuple[memoryview, int]]:
    """Yield what stands between the outermost commas of a list or map, each with the place of its first colon."""
    view = _stripped(memoryview(text))
    if bytes(view[:1]) != opening:
        raise msgspec.ValidationError(f"Expected `{'array' if opening == b'[' else 'object'}`")
    if bytes(view[-1:]) != (b"]" if opening == b"[" else b"}"):
        raise msgspec.DecodeError("JSON is malformed: a list or map does not end where the text ends")
    commas, colons = _outermost(view, name)
    if len(commas) == 0 and not _stripped(view[1:-1]):
        return
    starts, ends = [1, *(commas + 1).tolist()], [*commas.tolist(), len(view) - 1]
    first = (
        colons[np.minimum(np.searchsorted(colons, starts), len(colons) - 1)].tolist() if len(colons) else ends
    )
    for start, end, colon in zip(starts, ends, first, strict=True):
        yield (
            _stripped(view[start:end]) if opening == b"[" else view[start:end],
            (colon - start if start <= colon < end else -1),
        )


def _outermost(view: memoryview, name: str) -> tuple[Places, Places]:
    """Return the places of the commas and colons of the outermost list or map."""
    commas: list[Places] = []
    colons: list[Places] = []
    depth = count = parts = at = 0
    for plain, places in _plain_chunks(view):
        if at and depth == 0 and plain.size:
            break
        near = np.flatnonzero((plain | _BRACKET_BITS) == _BRACKET)
        steps = _STEPS[plain[near]]
        brackets = near[steps != 0]
        depths = np.cumsum(steps[steps != 0], dtype=np.int32) + depth
        if (ends := brackets[depths <= 0]).size and int(ends[0]) < plain.size - 1:
            depth = -1
            break
        for start, end in _outermost_parts(brackets, depths, depth, plain.size):
            part = plain[start:end]
            commas.append(places(np.flatnonzero(part == ord(",")) + start))
            colons.append(places(np.flatnonzero(part == ord(":")) + start))
            count += len(commas[-1])
            parts += 1
            # A member has two parts; more are malformed.
            if count >= MEMBERS_LIMIT or parts > 4 * MEMBERS_LIMIT:
                raise InvalidGroupError(name, f"has more than {MEMBERS_LIMIT} members")
        depth, at = int(depths[-1]) if depths.size else depth, at + plain.size
    else:
        if depth == 0:
            nothing = np.empty(0, np.int64)
            return np.concatenate([*commas, nothing]), np.concatenate([*colons, nothing])
    raise msgspec.DecodeError("JSON is malformed: a list or map does not end where the text ends")


def _outermost_parts(
    brackets: Places, depths: NDArray[np.int32], before: int, size: int
) -> Iterator[tuple[int, int]]:
    """Return the parts of a chunk at depth 1: between brackets, with the depth behind each and before the first."""
    starts, ends = np.concatenate([[0], brackets + 1]), np.concatenate([brackets, [size]])
    is_outermost = (np.concatenate([[before], depths]) == 1) & (starts < ends)
    return zip(starts[is_outermost].tolist(), ends[is_outermost].tolist(), strict=True)


def _stripped(view: memoryview) -> memoryview:
    """Return a text without the white space around it."""
    start, end = 0, len(view)
    while start < end and view[start] in _SPACE:
        edge = bytes(view[start : min(start + _EDGE_BYTES, end)])
        start += len(edge) - len(edge.lstrip(_SPACE))
    while start < end and view[end - 1] in _SPACE:
        edge = bytes(view[max(start, end - _EDGE_BYTES) : end])
        end -= len(edge) - len(edge.rstrip(_SPACE))
    return view[start:end]


def _chunks(text: Text) -> Iterator[NDArray[np.uint8]]:
    whole = np.frombuffer(text, np.uint8)
    for at in range(0, whole.size, _CHUNK_BYTES):
        yield whole[at : at + _CHUNK_BYTES]


def _plain_chunks(text: Text) -> Iterator[tuple[NDArray[np.uint8], Callable[[Places], Places]]]:
    """Yield the text without its strings, and what turns places there into places in the text.

    No chunk ends in an escape sequence.
    """
    view, at, inside = memoryview(text), 0, False
    while at < len(view):
        chunk = bytes(view[at : at + _CHUNK_BYTES])
        if not inside and b'"' not in chunk:
            yield np.frombuffer(chunk, np.uint8), partial(np.add, at)
            at += len(chunk)
            continue
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 and at + len(chunk) < len(view):
            chunk = chunk[:-1]
        plain = np.frombuffer(chunk.replace(b"\\\\", b"  ").replace(b'\\"', b"  "), np.uint8)
        quotes = np.cumsum(plain == ord('"'), dtype=np.int32) + inside
        outside = np.flatnonzero(quotes % 2 == 0)
        yield plain[outside], (outside + at).__getitem__
        inside = bool(quotes[-1] % 2)
        at += len(chunk)
