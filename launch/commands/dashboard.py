"""`rolloutmq dashboard`: serve the page of a run until Ctrl-C, and print its link."""

import asyncio
import socket
import sys
from pathlib import Path

import uvloop

from rolloutmq.bus.lifecycle import signals
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.address import is_loopback
from rolloutmq.schemas.printable import printable
from rolloutmq.services.dashboard.entry.sessions import Sessions
from rolloutmq.services.dashboard.server import bind, link_of, page_tls, serve
from rolloutmq.services.monitor.liveness import fate_of
from rolloutmq.services.monitor.text.exit_codes import reader_may_leave
from rolloutmq.services.process.runner import Stop


def dashboard(run_dir: Path, host: str, port: int) -> int:
    """Serve the page until a signal; return the exit code. Blocks; call it from the main thread.

    Raises:
        AddressInUseError: Another process uses the port.
        ConfigError: The address cannot be bound, or the certificate of the run cannot be used.
    """
    root = run_dir.resolve()
    sessions = Sessions()
    with bind(host, port) as bound:
        bound.listen()
        tls = page_tls(root, host)
        if tls is None and not is_loopback(host):
            sys.stderr.write(
                f"warning: {host} is within reach of other machines, and plain HTTP is not encrypted: who is on the "
                f"way can read the page and act as you; `ssh -L {port or 'PORT'}:127.0.0.1:{port or 'PORT'}` is safer\n"
            )
        with reader_may_leave():
            sys.stdout.write(f"{link_of(bound, sessions.token, 'http' if tls is None else 'https')}\n")
            sys.stdout.write(
                f"{printable(fate_of(RunLayout(root)).say(RunLayout(root)))}; Ctrl-C ends the page\n"
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(root, bound, sessions))
    return 0


async def _serve(root: Path, bound: socket.socket, sessions: Sessions) -> None:
    stop, loop = Stop(), asyncio.get_running_loop()

    def asked(reason: str) -> None:
        loop.call_soon_threadsafe(stop.request, reason)

    with signals(asked):
        await serve(root, bound, sessions, stop)
