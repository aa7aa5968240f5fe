"""An inference server without a model: it answers a fixed number of requests a second, however many ask.

    python -S engine.py NAME RUN_DIR ANSWERS_PER_S

A request is a connection to its port; the answer is the line `done`, in the order of arrival. It publishes its address
and load in the run directory like any engine. At SIGUSR1 it drains: it takes no new request, answers what it has, and
ends. It needs no package, so that it starts at once.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

BEAT_S: Final = 0.25


class Engine:
    """Queue of requests, and the address file."""

    def __init__(self, name: str, run_dir: Path, answers_per_s: float) -> None:
        self._name = name
        self._path = run_dir / f"{name}.json"
        self._each_s = 1.0 / answers_per_s
        self._free_at = 0.0
        self._in_hand = self._asked = self._number = 0
        self._given_s = self._told_s = self._told_at = 0.0
        self._draining = asyncio.Event()
        self._port = 0

    async def run(self) -> None:
        """Serve until SIGUSR1, and then until nobody asks."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._draining.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        while not self._draining.is_set():
            self._publish()
            try:
                await asyncio.wait_for(self._draining.wait(), BEAT_S)
            except TimeoutError:
                continue
        asked = True
        while self._in_hand or asked:  # who read the address before may still come
            self._publish()
            await asyncio.sleep(BEAT_S)
            asked = bool(self._asked)
        server.close()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        self._asked += 1
        self._in_hand += 1
        self._given_s += self._each_s
        self._free_at = max(loop.time(), self._free_at) + self._each_s
        try:
            await asyncio.sleep(self._free_at - loop.time())
            writer.write(b"done\n")
            await writer.drain()
        except OSError:
            pass  # who asked is gone
        finally:
            self._in_hand -= 1
            writer.close()

    def _busy(self) -> float:
        """Return the part of the time since the last call in which requests were there to answer."""
        now = asyncio.get_running_loop().time()
        worked_s, since_s = self._given_s - max(0.0, self._free_at - now), now - self._told_at
        part = (worked_s - self._told_s) / since_s
        self._told_s, self._told_at = worked_s, now
        return round(min(1.0, part), 3)

    def _publish(self) -> None:
        self._number += 1
        told = {
            "url": f"http://127.0.0.1:{self._port}",
            "pid": os.getpid(),
            "name": self._name,
            "number": self._number,
            "in_hand": self._in_hand,
            "busy": self._busy(),
            "draining": self._draining.is_set(),
        }
        self._asked = 0
        new = self._path.with_suffix(f".{os.getpid()}.tmp")
        new.write_text(json.dumps(told))
        new.replace(self._path)


if __name__ == "__main__":
    asyncio.run(Engine(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])).run())
