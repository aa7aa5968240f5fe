"""Signals are handled during the block; a failure logs its reason, and its exit code tells whether to restart."""

import os
import signal
import threading

import pytest

from rolloutmq.bus.lifecycle import log_failure, signals
from rolloutmq.schemas.errors import ConfigError, MissingError, NothingToLearnError, RecordVersionError
from rolloutmq.schemas.process import PERMANENT_FAILURE


def test_handlers_and_mask_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        seen: list[str] = []
        with signals(seen.append):
            assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == ["SIGUSR1"]
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_a_drain_that_came_too_early_arrives_when_the_handler_stands() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        # To this thread alone: another one may not block the signal, and the process would die.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        drained: list[bool] = []
        with signals(lambda _: None, lambda: drained.append(True)):
            pass
        assert drained == [True]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MissingError("config.json", "start it"), 1, "error: config.json is missing: start it"),
        (ConfigError("model.path", "is bad"), PERMANENT_FAILURE, "error: model.path: is bad"),
        (NothingToLearnError(100, "flat"), PERMANENT_FAILURE, "flat"),
        (RecordVersionError("journal", 2, 3), PERMANENT_FAILURE, "got version 2, this one reads version 3"),
        (ValueError("a\nb"), 1, "error: ValueError: a b"),
        (ExceptionGroup("two", [ValueError("a"), ConfigError("x", "y")]), PERMANENT_FAILURE, "a; x: y"),
    ],
)
def test_a_failure_ends_with_its_reason(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    assert log_failure("test", error) == code
    assert line in capsys.readouterr().err.splitlines()[-1]
