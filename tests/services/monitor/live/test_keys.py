"""Bytes of terminals become keys, in whatever parts they arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.services.monitor.live.keys import KeyDecoder


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"jk", ["j", "k"]),
        (b"\x1b[A\x1bOB", ["up", "down"]),
        (b"\x1b[5~\x1b[6~", ["page up", "page down"]),
        (b"\x1b[1~\x1bOF\x1b[H", ["home", "end", "home"]),
        (b"\r\n\t\x1b[Z\x7f", ["enter", "enter", "tab", "back tab", "backspace"]),
        ("é語".encode(), ["é", "語"]),
        (b"\x1b[1;5A\x1b[200~a", ["a"]),
        (b"\x1bxy", ["y"]),
        (b"\xff\x00q", ["q"]),
        (b"\x1b\x1b[A", ["escape", "up"]),
    ],
)
def test_keys_of_bytes(data: bytes, keys: list[str]) -> None:
    decoder = KeyDecoder()
    assert decoder.feed(data) == keys
    assert decoder.flush() == []
    parts = KeyDecoder()
    assert [key for one in data for key in parts.feed(bytes([one]))] == keys


def test_an_escape_alone_is_a_key_once_nothing_followed() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b") == []
    assert decoder.is_waiting
    assert (decoder.flush(), decoder.is_waiting) == (["escape"], False)
    assert decoder.feed(b"[A") == ["[", "A"]


@given(st.binary(max_size=200))
def test_any_bytes_are_keys_or_nothing(data: bytes) -> None:
    decoder = KeyDecoder()
    for key in [*decoder.feed(data), *decoder.flush()]:
        assert key.isprintable()
    assert decoder.feed(b"\x1b[A")[-1:] in (["up"], [])
