"""The page of a run that `up` starts: the launcher listens, and starts the server of the page at the first connection.

Until somebody opens the link the page costs a socket. Its server ends once nobody looks, and the next connection starts
another; with the same key, so an open page goes on. The run depends on none of it: a server that crashes is started
again at the next look, later each time, and an address that cannot be bound is told and left.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Final

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import OutputFailedError, ResourceError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import shell_word
from rolloutmq.schemas.process import ProcessSpec, Role, python_command
from rolloutmq.services.dashboard.entry import handover
from rolloutmq.services.dashboard.entry.handover import Secrets
from rolloutmq.services.dashboard.entry.sessions import KEY_BYTES
from rolloutmq.services.dashboard.server import LISTEN_FD, SECRETS_FD, bind, link_of
from rolloutmq.services.monitor.text.exit_codes import reader_may_leave
from rolloutmq.services.process.child import Process, spawn
from rolloutmq.services.process.descriptors import readable

logger = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
BACKLOG: Final = 128
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Pauses after a crash: each is twice the last."""
GRACE_S: Final = 3.0
"""Time of the server to end when the run ends."""


class PageOnDemand:
    """Socket, secrets and server of the page.

    Args:
        layout: The run directory.
        marker: Run token, a marker in every process of the run.
        bound: The listening socket.
        scheme: Scheme of the link.
    """

    def __init__(self, layout: RunLayout, marker: str, bound: socket.socket, scheme: str) -> None:
        self._layout = layout
        self._marker = marker
        self._bound = bound
        token, key = secrets.token_urlsafe(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
        self._secrets = handover.create(Secrets(token, key))
        self.link = link_of(bound, token, scheme)

    def close(self) -> None:
        """Forget the secrets. The socket is its owner's."""
        os.close(self._secrets)

    async def run(self) -> None:
        """Start the server at each first connection, until cancelled. Raises nothing else."""
        pause_s = FIRST_PAUSE_S
        while True:
            await readable(self._bound.fileno())
            try:
                process = spawn(self._spec(), self._marker)
            except OSError as error:
                logger.warning("page not started error=%s", error)
                code: int | None = None
            else:
                code = await _ended(process)
            if code == 0:
                pause_s = FIRST_PAUSE_S
                continue
            logger.warning("page ended code=%s next_s=%.0f", code, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _spec(self) -> ProcessSpec:
        fd = self._bound.fileno()
        run = ("--run-dir", str(self._layout.root))
        return ProcessSpec(
            name=Role.DASHBOARD.value,
            role=Role.DASHBOARD,
            argv=python_command(sys.executable, "rolloutmq.launch.service_process", "serve-dashboard", *run),
            env={LISTEN_FD: str(fd), SECRETS_FD: str(self._secrets)},
            log=str(self._layout.log(Role.DASHBOARD.value)),
            fds=(fd, self._secrets),
        )


@contextlib.contextmanager
def page_of(
    config: RunConfig, layout: RunLayout, marker: str, *, as_json: bool = False
) -> Iterator[PageOnDemand | None]:
    """Listen for the page during the block, and print its link; None if it is off, or its address cannot be bound.

    Args:
        config: Configuration of the run.
        layout: The run directory.
        marker: Run token.
        as_json: Print the link as a line of JSON.
    """
    if not config.dashboard.enabled:
        yield None
        return
    try:
        bound = bind(HOST, config.dashboard.port)
    except (ResourceError, UsageError) as error:
        again = f"rolloutmq dashboard {shell_word(layout.root)}"
        sys.stderr.write(f"warning: no page for this run: {error}; `{again}` serves one\n")
        yield None
        return
    with bound:
        bound.setblocking(False)
        bound.listen(BACKLOG)
        page = PageOnDemand(layout, marker, bound, config.run.scheme)
        told = json.dumps({"event": "dashboard", "url": page.link}) if as_json else f"dashboard {page.link}"
        with contextlib.closing(page):
            with contextlib.suppress(OutputFailedError), reader_may_leave():
                sys.stdout.write(f"{told}\n")
            yield page


async def _ended(process: Process) -> int | None:
    """Wait for the end of a server, and return its exit code; ask it to end when cancelled."""
    try:
        await readable(process.fileno())
    except asyncio.CancelledError:
        process.send_group(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await readable(process.fileno())
        process.send_group(signal.SIGKILL)
        await readable(process.fileno())
        raise
    finally:
        found = process.poll()
        process.close()
    return None if found is None else found.code
