"""Test groups: tokens i32, mask, and log-probabilities f32, 9 bytes a token, with realistic contents.

Both sides of a comparison start with prepared data. The distinct groups exceed the processor's cache, so that neither
side works on cached memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import numpy as np

from rolloutmq import Group
from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.schemas.wire.envelope import GROUP_LIMIT_BYTES

POOL_BYTES: Final = 32 << 20
VOCABULARY: Final = 150_000
PROMPT_PART: Final = 8
"""One token in this many belongs to the prompt, and is not trained."""
TOKEN_BYTES: Final = 9


@dataclass(frozen=True)
class Shape:
    """Number of sequences, and tokens of each."""

    sequences: int
    tokens: int

    def __str__(self) -> str:
        nbytes = self.nbytes
        size = f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.3g} kB"
        return f"groups of {self.sequences} x {self.tokens:,} tokens, {size}"

    @property
    def nbytes(self) -> int:
        """Return the approximate size of such a group."""
        return self.sequences * self.tokens * TOKEN_BYTES

    @classmethod
    def of_bytes(cls, nbytes: int, sequences: int = 8) -> "Shape":
        """Return the shape of about this many bytes."""
        return cls(sequences, max(1, nbytes // (sequences * TOKEN_BYTES)))

    @property
    def word(self) -> str:
        """The shape as one word, for a command line; `parse` reads it."""
        return f"{self.sequences}x{self.tokens}"

    @classmethod
    def parse(cls, word: str) -> "Shape":
        sequences, _, tokens = word.partition("x")
        return cls(int(sequences), int(tokens))


def columns(shape: Shape, seed: int) -> dict[str, Any]:
    """Return the columns of one group as arrays."""
    random = np.random.default_rng(seed)
    size = (shape.sequences, shape.tokens)
    mask = np.ones(size, bool)
    mask[:, : shape.tokens // PROMPT_PART] = False
    return {
        "tokens": random.integers(0, VOCABULARY, size, np.int32),
        "mask": mask,
        "scores": random.random(shape.sequences),
        "inference_logprobs": -random.exponential(1.0, size).astype(np.float32),
    }


def lists(shape: Shape, seed: int) -> dict[str, Any]:
    """Return the same columns as Python lists, the form of an environment with an HTTP client."""
    return {name: values.tolist() for name, values in columns(shape, seed).items()}


def pool(shape: Shape, seed: int = 0) -> list[Group]:
    """Return distinct groups of `POOL_BYTES` in total."""
    count = max(1, POOL_BYTES // shape.nbytes)
    return [Group.build("g", **columns(shape, seed * count + number)) for number in range(count)]


def fresh(groups: list[Group], producer: str) -> Iterator[Group]:
    """Yield the groups in an endless cycle, each time under a new id."""
    for number, group in enumerate(cycle(groups)):
        yield Group(
            f"{producer}/{number}",
            group.columns,
            sequences=group.sequences,
            tokens=group.tokens,
            stamped=False,
        )


def bodies(shape: Shape, seed: int = 0) -> list[bytes]:
    """Return the wire bytes of the pool's groups, each in one piece."""
    return [b"".join(encode_group(group, GROUP_LIMIT_BYTES).frames) for group in pool(shape, seed)]
