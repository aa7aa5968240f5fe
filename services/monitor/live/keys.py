"""Keys of a terminal: bytes in, names of keys out. Pure.

A printable character is its own name. Terminals send a special key as an escape sequence, which may arrive in parts. An
escape that nothing follows is the key itself: the caller says so by `flush` after `ESCAPE_S`.
"""

import codecs
from typing import Final

ESCAPE_S: Final = 0.05
"""Wait for the rest of an escape sequence: over ssh its parts come in one packet, or in two that follow each other."""
SEQUENCE_LIMIT: Final = 32
"""Longest escape sequence, in characters: a longer one is none of a key."""
UP, DOWN, LEFT, RIGHT = "up", "down", "left", "right"
PAGE_UP, PAGE_DOWN, HOME, END = "page up", "page down", "home", "end"
ENTER, ESCAPE, TAB, BACK_TAB, BACKSPACE = "enter", "escape", "tab", "back tab", "backspace"
_PLAIN: Final = {
    "\r": ENTER,
    "\n": ENTER,
    "\t": TAB,
    "\x7f": BACKSPACE,
    "\x08": BACKSPACE,
    "\x04": "ctrl-d",
    "\x0c": "ctrl-l",
    "\x15": "ctrl-u",
}
_SEQUENCES: Final = {
    "A": UP,
    "B": DOWN,
    "C": RIGHT,
    "D": LEFT,
    "H": HOME,
    "F": END,
    "Z": BACK_TAB,
    "1~": HOME,
    "4~": END,
    "5~": PAGE_UP,
    "6~": PAGE_DOWN,
    "7~": HOME,
    "8~": END,
}
"""Ends of the sequences of xterm, the Linux console, rxvt, tmux and screen behind `ESC [` or `ESC O`."""


class KeyDecoder:
    """Names of the keys in a stream of bytes. Bytes that are no key of these are left out."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""

    @property
    def is_waiting(self) -> bool:
        """Return whether an escape has begun whose rest may follow."""
        return bool(self._held)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that the bytes complete, in order."""
        keys = []
        for char in self._text.decode(data):
            if self._held:
                keys += self._continue(char)
            elif char == "\x1b":
                self._held = char
            else:
                keys += _plain(char)
        return keys

    def flush(self) -> list[str]:
        """Return the key of an escape that nothing followed."""
        held, self._held = self._held, ""
        return [ESCAPE] if held == "\x1b" else []

    def _continue(self, char: str) -> list[str]:
        """Take a character behind an escape, and return the keys that it completes."""
        if char == "\x1b":
            was, self._held = self._held, char
            return [ESCAPE] if was == "\x1b" else []
        self._held += char
        if len(self._held) == 2:
            if char in "[O":
                return []
            self._held = ""
            return []  # a key with alt
        if not ("@" <= char <= "~") and len(self._held) < SEQUENCE_LIMIT:
            return []
        sequence, self._held = self._held[2:], ""
        name = _SEQUENCES.get(sequence)
        return [name] if name is not None else []


def _plain(char: str) -> list[str]:
    if (name := _PLAIN.get(char)) is not None:
        return [name]
    return [char] if char.isprintable() else []
