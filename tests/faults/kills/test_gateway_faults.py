"""The gateway and its broker are killed while clients post and a trainer polls: every answer holds.

The clients are those of Atropos: three attempts, the last after two seconds, and then they give up. None may reach
that point: requests during a restart of the gateway wait in the backlog of its socket.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from tests.services.gateway.site import ENVIRONMENT, TRAINER, scored

from rolloutmq.schemas.files import RunLayout

KILLS: Final = int(os.environ.get("ROLLOUTMQ_SOAK_ROUNDS", "10")) // 2
ENVIRONMENTS: Final = 3
"""More than go into a batch evenly: a redelivered one has other groups."""
POSTERS: Final = 6
FILLERS: Final = 1 << 20
TOTAL_S: Final = 90.0


@contextmanager
def gateway(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `rolloutmq gateway` as a user would, and end it as a user would."""
    command = (sys.executable, "-m", "rolloutmq.launch.cli", "gateway", "--plain", "--port", "0")
    more = (
        "--run-dir",
        str(run_dir),
        "--set",
        "orchestrator.backoff_s=0.2",
        "--set",
        "orchestrator.crash_limit=100",
    )
    with (run_dir.parent / "gateway.out").open("ab") as out:
        process = subprocess.Popen([*command, *more], stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def until(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def url_of(layout: RunLayout) -> str:
    until(lambda: layout.gateway.exists(), "the gateway to listen")
    url: str = json.loads(layout.gateway.read_text())["url"]
    return url


def pid_of(layout: RunLayout, name: str) -> int:
    for one in json.loads(layout.processes.read_text()):
        if one["name"] == name:
            return int(one["pid"])
    return 0


class Load:
    """Environments that post and poll, and a trainer that collects."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered: list[int] = []
        self.trained: list[int] = []
        self.ending = False

    async def run(self, faults: Any) -> None:
        async with aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(300)) as session:
            await self._post(session, "/register", {**TRAINER, "batch_size": 8})
            await self._get(session, "/batch")
            envs = [
                (await self._post(session, "/register-env", ENVIRONMENT))["env_id"]
                for _ in range(ENVIRONMENTS)
            ]
            posters = [
                asyncio.create_task(self._produce(session, envs[lane % ENVIRONMENTS], lane))
                for lane in range(POSTERS)
            ]
            trainer = asyncio.create_task(self._train(session))
            await asyncio.to_thread(faults)
            self.ending = True
            await asyncio.gather(*posters)
            async with asyncio.timeout(TOTAL_S):
                filler = FILLERS
                while not set(self.trained).issuperset(self.answered):
                    await self._post(session, "/scored_data", scored(filler, env_id=envs[0]))
                    filler += 1
                    await asyncio.sleep(0.05)
            trainer.cancel()

    async def _produce(self, session: aiohttp.ClientSession, env: int, lane: int) -> None:
        tag = lane
        while not self.ending:
            await self._get(session, "/status-env", {"env_id": env})
            await self._post(session, "/scored_data", scored(tag, env_id=env))
            self.answered.append(tag)
            tag += POSTERS

    async def _train(self, session: aiohttp.ClientSession) -> None:
        while True:
            batch = (await self._get(session, "/batch"))["batch"]
            self.trained += [group["tokens"][0][0] for group in batch or ()]
            await asyncio.sleep(0.02 if batch else 0.1)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: Any) -> Any:
        return await self._asked(session, "POST", path, body)

    async def _get(self, session: aiohttp.ClientSession, path: str, body: Any = None) -> Any:
        return await self._asked(session, "GET", path, body)

    async def _asked(self, session: aiohttp.ClientSession, method: str, path: str, body: Any) -> Any:
        for pause_s in (0.5, 1.5, None):
            try:
                async with session.request(method, path, json=body) as answer:
                    assert answer.status == 200, (path, answer.status, await answer.text())
                    return await answer.json()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("not reached")


def kill(layout: RunLayout, victim: str, load: Load) -> None:
    """Kill it in the middle of work, and wait until it is back."""
    before, goal = pid_of(layout, victim), len(load.trained) + 16
    until(lambda: len(load.trained) >= goal, "some batches", 60.0)
    os.kill(before, signal.SIGKILL)
    until(lambda: pid_of(layout, victim) not in (0, before), "another life", 60.0)


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["gateway", "broker"])
def test_nothing_that_was_answered_is_lost_when_it_is_killed(run_dir: Path, victim: str) -> None:
    layout = RunLayout(run_dir)
    with gateway(run_dir):
        load = Load(url_of(layout))

        def faults() -> None:
            for _ in range(KILLS):
                kill(layout, victim, load)

        asyncio.run(load.run(faults))
    times = Counter(load.trained)
    assert set(load.answered) <= set(times), "nothing is lost"
    twice = [tag for tag, count in times.items() if count > 1]
    # A post whose answer died with the gateway is sent again and is no second group; a batch that went and whose
    # settlement died is settled by the next life. Only the moment in between, in which the last byte of a batch went
    # and nothing is written down yet, cannot be told: one batch. A broker takes nothing along.
    assert len(twice) <= (4 if victim == "gateway" else 0), twice
