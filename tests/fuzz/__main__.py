"""`python -m tests.fuzz [SECONDS [SEED]]`: fuzz the decoders until one breaks, or the time is over.

It runs with atheris, guided by coverage, where that is installed, otherwise with random mutations of valid messages.
Bytes that break a decoder are written to the standard output, ready to be added to the regression tests.
"""

import importlib
import importlib.util
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.fuzz.target import EDITS, Edit, fuzz_one, mutate, seeds

DEFAULT_S: Final = 60.0
EDITS_LIMIT: Final = 12


def main(arguments: list[str]) -> int:
    """Fuzz for so many seconds; return the exit code."""
    seconds = float(arguments[0]) if arguments else DEFAULT_S
    if importlib.util.find_spec("atheris") is not None:
        return _guided(seconds)
    return _randomly(seconds, int(arguments[1]) if len(arguments) > 1 else time.time_ns())


def _guided(seconds: float) -> int:
    atheris = importlib.import_module("atheris")
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.instrument_all()
        atheris.Setup([sys.argv[0], f"-max_total_time={max(1, round(seconds))}", corpus], fuzz_one)
        atheris.Fuzz()
    return 0


def _randomly(seconds: float, seed: int) -> int:
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        data = mutate(rng.choice(seeds()), [_edit(rng) for _ in range(rng.randint(1, EDITS_LIMIT))])
        count += 1
        try:
            fuzz_one(data)
        except Exception:
            sys.stdout.write(f"seed {seed}: input {count} breaks a decoder: {data!r}\n")
            raise
    sys.stdout.write(f"seed {seed}: {count} inputs\n")
    return 0


def _edit(rng: random.Random) -> Edit:
    return rng.choice(EDITS), rng.random(), rng.randrange(1 << 16)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
