"""`python -m tests.fuzz [NAME ...] [SECONDS [SEED [NUMBER]]]`: run fuzzers until one finds a defect or time is up.

Each fuzzer has SECONDS. With a NUMBER only that input of the seed is tried. A defect ends the command with 1, and with
what makes the input again: seed and number, and the input itself. The decoders run with atheris, guided by coverage,
where that is installed and no seed is given.
"""

import contextlib
import importlib
import importlib.util
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.campaign import BrokenError, Fuzzer, run
from tests.fuzz.decoders import DecoderFuzzer, fuzz_one, seeds

DEFAULT_S: Final = 60.0


def _recovery() -> Fuzzer:
    from tests.fuzz.recovery.fuzzer import RecoveryFuzzer

    return RecoveryFuzzer()


def _gateway() -> Fuzzer:
    from tests.fuzz.gateway.fuzzer import GatewayFuzzer

    return GatewayFuzzer()


def _run_directory() -> Fuzzer:
    from tests.fuzz.run_directory.fuzzer import RunDirectoryFuzzer

    return RunDirectoryFuzzer()


FUZZERS: Final[dict[str, Callable[[], Fuzzer]]] = {
    "decoders": DecoderFuzzer,
    "recovery": _recovery,
    "gateway": _gateway,
    "run-directory": _run_directory,
}
"""They are imported when they run: the last one loads torch."""


class Order(NamedTuple):
    """What the command line asks for."""

    names: Sequence[str]
    seconds: float
    seed: int | None
    number: int | None


def main(arguments: Sequence[str]) -> int:
    """Run the named fuzzers, or all of them, one after the other; return the exit code."""
    try:
        order = parsed(arguments)
    except ValueError as error:
        sys.stderr.write(f"fuzz: {error}\n")
        return 2
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # damage is logged: thousands of lines that are as they should be
    try:
        return 0 if all(_fuzzed(name, order) for name in order.names) else 1
    finally:
        logging.disable(before)


def _fuzzed(name: str, order: Order) -> bool:
    if name == DecoderFuzzer.name and order.seed is None and importlib.util.find_spec("atheris"):
        _guided(order.seconds)
        return True
    return _holds(FUZZERS[name], order)


def parsed(arguments: Sequence[str]) -> Order:
    """Return what the arguments ask for; ValueError if they are wrong."""
    names = [one for one in arguments if not one[:1].isdigit()]
    numbers = list(arguments[len(names) :])
    if unknown := set(names) - FUZZERS.keys():
        raise ValueError(f"unknown fuzzer (got {min(unknown)}); use some of {', '.join(FUZZERS)}")
    if len(numbers) > 3:
        raise ValueError("at most SECONDS, SEED and NUMBER follow the names")
    seconds = float(numbers[0]) if numbers else DEFAULT_S
    seed, number = (int(numbers[at]) if len(numbers) > at else None for at in (1, 2))
    return Order(names or list(FUZZERS), seconds, seed, number)


def _holds(made: Callable[[], Fuzzer], order: Order) -> bool:
    """Run a fuzzer, tell the result, and return whether all promises hold."""
    seed = time.time_ns() if order.seed is None else order.seed
    one = order.number is not None
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        fuzzer = stack.enter_context(made())
        try:
            limit_s = float("inf") if one else order.seconds
            count, outcomes = run(
                fuzzer, seed, seconds=limit_s, inputs=1 if one else None, first=order.number or 1
            )
        except BrokenError as error:
            _tell(fuzzer, error)
            return False
    words = ", ".join(f"{number} {what}" for what, number in outcomes.most_common() if what)
    lasted_s = time.monotonic() - began
    sys.stdout.write(
        f"{fuzzer.name}: seed {seed}: {count} inputs in {lasted_s:.0f} s{words and f' ({words})'}\n"
    )
    sys.stdout.flush()
    return True


def _tell(fuzzer: Fuzzer, error: BrokenError) -> None:
    """Write the defect, how to meet it again, and what is kept of the input."""
    kept = Path(tempfile.mkdtemp(prefix="rolloutmq-fuzz-"))
    cause = "".join(traceback.format_exception(error.__cause__))
    described = fuzzer.keep(kept)
    where = f"{kept}: " if any(kept.iterdir()) else ""
    if not where:
        kept.rmdir()
    sys.stdout.write(
        f"{cause}{error}\nagain: python -m tests.fuzz {fuzzer.name} 0 {error.seed} {error.number}\n"
        f"input: {where}{described}\n"
    )
    sys.stdout.flush()


def _guided(seconds: float) -> None:
    atheris = importlib.import_module("atheris")
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.instrument_all()
        atheris.Setup([sys.argv[0], f"-max_total_time={max(1, round(seconds))}", corpus], fuzz_one)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
