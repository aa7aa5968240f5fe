import os
import signal
import subprocess
import sys
import threading

import pytest

from rolloutmq.trainer.process import Stop, StoppedError, stop_on_signals


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_while_computing_is_noted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        send(number)
        assert stop.asked
    assert signal.getsignal(number) == before


def test_a_signal_ends_a_wait() -> None:
    never = threading.Event()
    with stop_on_signals() as stop:
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        with pytest.raises(StoppedError), stop.interrupting():
            never.wait(10)
        timer.join()
        assert stop.asked


def test_a_request_made_before_ends_the_wait_at_once() -> None:
    stop = Stop()
    stop.request("test")
    with pytest.raises(StoppedError), stop.interrupting():
        raise AssertionError
    stop.request("test")  # outside of the block it is only noted


def test_a_blocked_drain_arrives_once_the_handler_stands() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # other threads do not block it
        with stop_on_signals() as stop:
            assert stop.asked
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_the_second_signal_forces() -> None:
    code = (
        "import signal\nfrom rolloutmq.trainer.process import stop_on_signals\n"
        "with stop_on_signals():\n    signal.raise_signal(15)\n    signal.raise_signal(15)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 130
