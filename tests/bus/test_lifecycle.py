"""Signals are handled during the block; a failure logs its reason, and its exit code tells whether to restart."""

import errno
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import pytest

from rolloutmq.bus import lifecycle
from rolloutmq.bus.lifecycle import (
    IN_USE,
    LogFormatter,
    LogHandler,
    gc_paused,
    hide,
    log_failure,
    set_up_logging,
    signals,
    without_secrets,
)
from rolloutmq.schemas.errors import (
    ConfigError,
    ConsumerFencedError,
    MissingError,
    NothingToLearnError,
    PackageMissingError,
    RecordVersionError,
    RefusedError,
)
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.envelope import ErrorCode


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
        (PackageMissingError("the package x", "install it"), PERMANENT_FAILURE, "the package x is missing"),
        (ConfigError("model.path", "is bad"), PERMANENT_FAILURE, "error: model.path: is bad"),
        (RefusedError(ErrorCode.FORBIDDEN, "no"), PERMANENT_FAILURE, "request refused (forbidden): no"),
        (RefusedError(ErrorCode.VERSION, "other"), PERMANENT_FAILURE, "request refused (version): other"),
        (RefusedError(ErrorCode.CONFLICT, "no"), 1, "request refused (conflict): no"),
        (NothingToLearnError(100, "flat"), PERMANENT_FAILURE, "flat"),
        (RecordVersionError("journal", 2, 3), PERMANENT_FAILURE, "got version 2, this one reads version 3"),
        (ConsumerFencedError("trainer"), IN_USE, "another process registered under this name"),
        (ValueError("a\nb"), 1, "error: ValueError: a b"),
        (ExceptionGroup("two", [ValueError("a"), ConfigError("x", "y")]), PERMANENT_FAILURE, "a; x: y"),
    ],
)
def test_a_failure_ends_with_its_reason(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    assert log_failure("test", error) == code
    assert line in capsys.readouterr().err.splitlines()[-1]


FORGED = "\n2026-01-01 00:00:00.000 INFO broker all is well"


def logged(message: str, *args: object, error: BaseException | None = None) -> list[str]:
    """Return the lines that the log gets."""
    about = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("gateway", logging.INFO, __file__, 1, message, args, about)
    return LogFormatter().format(record).split("\n")


def test_a_name_forges_no_line_and_moves_no_cursor() -> None:
    (line,) = logged("environment registered name=%s", f"maths\x1b[2J{FORGED}")
    assert line.endswith(r"name=maths\u001b[2J\n2026-01-01 00:00:00.000 INFO broker all is well")


def test_the_lines_of_a_traceback_are_indented_and_printable() -> None:
    try:
        raise ValueError(f"\x1b[31m{FORGED}")
    except ValueError as error:
        first, *rest = logged("failed", error=error)
    assert first.endswith("failed")
    assert "Traceback" in rest[0]
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in "".join(rest)


class AnswerError(Exception):
    def __getattr__(self, name: str) -> object:
        return {"detail": 429}[name]


def test_an_error_whose_attributes_raise_ends_no_process_that_logs_it() -> None:
    try:
        raise AnswerError
    except AnswerError as error:
        *_, raised, last = logged("failed", error=error)
    assert "raise AnswerError" in raised
    assert last.strip() == "AnswerError"


def test_the_reason_of_a_failure_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    log_failure("test", MissingError("\x1b[2J", f"see{FORGED}"))
    assert capsys.readouterr().err.splitlines()[-1].startswith(r"error: \u001b[2J is missing: see 2026")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_hidden", {})
    hide("s3cret-key", "env:KEY")
    hide("s3cret-key-2", "env:SECOND")
    hide("short", "env:SHORT")


@pytest.mark.usefixtures("hidden")
def test_the_log_and_the_reason_of_a_failure_show_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    set_up_logging()
    try:
        raise ValueError("refused s3cret-key")
    except ValueError as error:
        logging.getLogger("test").exception("with %s", "s3cret-key-2")
        log_failure("test", error)
    said = capsys.readouterr().err
    assert "s3cret" not in said
    assert "ERROR test with env:SECOND" in said
    assert said.count("ValueError: refused env:KEY") == 3  # two tracebacks and the reason


@pytest.mark.usefixtures("hidden")
def test_a_text_too_short_for_a_secret_stays() -> None:
    assert without_secrets("a short s3cret-key-2!") == "a short env:SECOND!"


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_paused_and_then_as_before(was_on: bool) -> None:
    is_on = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(KeyError), gc_paused():  # noqa: PT012 - the block is what is tested
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if is_on else gc.disable)()


class FullAtTimes(io.StringIO):
    """A stream on a disk that is full at times."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_records_that_a_full_disk_drops_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    stream = FullAtTimes()
    handler = LogHandler(stream)
    records = (
        logging.LogRecord("n", logging.INFO, __file__, 1, f"line {number}", (), None) for number in count()
    )
    stream.is_full = True
    handler.handle(next(records))
    handler.handle(next(records))
    assert handler.dropped == 2
    stream.is_full = False
    handler.handle(next(records))
    handler.handle(next(records))
    said = [line.split(" ", 3)[-1] for line in stream.getvalue().splitlines()]
    dropped = "rolloutmq.bus.lifecycle records dropped, the log could not be written count=2"
    assert said == ["n line 2", dropped, "n line 3"]
    assert (handler.dropped, capsys.readouterr().err) == (0, "")


def test_a_wrong_log_call_is_still_reported(capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogHandler(io.StringIO())
    handler.handle(logging.LogRecord("n", logging.INFO, __file__, 1, "%d", ("one",), None))
    assert handler.dropped == 0
    assert "--- Logging error ---" in capsys.readouterr().err


def test_a_log_file_without_room_loses_records_and_nothing_else(tmp_path: Path) -> None:
    """As a process of its own: the limit holds for all of its files."""
    log = tmp_path / "up.log"
    code = f"""
import logging, resource
from pathlib import Path
from rolloutmq.bus.lifecycle import set_up_logging
set_up_logging(Path({str(log)!r}))
for limit in (0, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    logging.getLogger("n").info("limit=%d", limit)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stderr == ""
    assert "count=1" in log.read_text().splitlines()[-1]
    assert len(log.read_text().splitlines()) == 2


def test_a_failure_ends_with_its_code_though_no_line_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FullAtTimes()
    stream.is_full = True
    monkeypatch.setattr(sys, "stderr", stream)
    assert log_failure("test", ConfigError("x", "y")) == PERMANENT_FAILURE
