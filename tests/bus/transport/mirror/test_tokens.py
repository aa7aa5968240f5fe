"""A server of another host knows the tokens of the run by the mirror: by role, revoked ones too, not the run's own."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from rolloutmq.bus.files import write_private
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.mirror import mirror as mirroring
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.files import Connection, RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.http_server.access import HttpAccess, access_of
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.run_token import engine_token

OWN = "0123456789abcdef"


class Joined(NamedTuple):
    """A host with an engine: the keys of the run, and the directory of this host."""

    keys: KeyDirectory
    layout: RunLayout
    mirror: Mirror


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "ASK_S", 0.05)


@asynccontextmanager
async def joined(run_dir: Path, tmp_path: Path, role: Role = Role.ENGINE) -> AsyncIterator[Joined]:
    """Run a broker with keys, and mirror its run with a key of a role."""
    keys, own = KeyDirectory.create(tmp_path / "keys"), RunLayout(tmp_path / "own")
    save_bundle(tmp_path / "engine.key", keys.new("engine-7", role))
    write_private(tmp_path / "token", OWN.encode())
    config = RunConfig.model_validate(
        {
            "run": {"name": "sums", "http_token_file": "token"},
            "broker": {"listen": "tcp://127.0.0.1:0", "keys": "keys"},
            "base_dir": tmp_path,
        }
    )

    def accept(data: bytes, layout: RunLayout) -> RunConfig:
        told = RunConfig.model_validate_json(data)
        section = told.run.model_copy(update={"dir": layout.root})
        return told.model_copy(update={"run": section})

    with running_broker(config, RunLayout(run_dir)) as broker:
        connection = Connection(addresses=broker.endpoints.listen[:1], key=str(tmp_path / "engine.key"))
        mirror = Mirror(connection, accept, own.root, serves=True)
        task = asyncio.create_task(mirror.run())
        try:
            async with asyncio.timeout(60):
                await mirror.ready()
                yield Joined(keys, own, mirror)
        finally:
            task.cancel()
            await asyncio.wait({task})


async def until(met: Callable[[], bool]) -> None:
    # What is waited for is a file: there is no event. The time limit is that of `joined`.
    while not met():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def access(host: Joined) -> HttpAccess:
    """Return the rules of an engine of this host, as it makes them when it starts."""
    return access_of(
        RunConfig.model_validate_json(host.layout.config.read_bytes()), Server.ENGINE, "10.0.0.9"
    )


def status(rules: HttpAccess, token: str) -> int:
    refused = rules.refusal(lambda _: "", token, "/v1/completions", method="POST")
    return 200 if refused is None else refused.status


async def test_an_engine_opens_to_the_roles_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    async with joined(run_dir, tmp_path) as host:
        rules = access(host)
        assert stat.S_IMODE(host.layout.http_tokens.stat().st_mode) == 0o600
        worker, trainer = (
            host.keys.new(f"{role.value}-7", role).token for role in (Role.WORKER, Role.TRAINER)
        )
        await until(
            lambda: status(rules, worker) == 200
        )  # the broker looks, the mirror asks, the engine looks
        assert status(rules, trainer) == 403
        assert status(rules, engine_token(OWN, "engine-7")) == 200, "of the workers of the run's host"
        for token in ("", OWN, engine_token(OWN, "engine-8"), worker[:-1]):
            assert status(rules, token) == 401
        host.keys.revoke("worker-7")
        await until(lambda: status(rules, worker) == 401)
        kept = {path.name: path.read_bytes() for path in host.layout.root.iterdir() if path.is_file()}
        assert not [name for name, data in kept.items() if OWN.encode() in data or worker.encode() in data]


@pytest.mark.parametrize("role", [Role.WORKER, Role.TRAINER, Role.MONITOR])
async def test_without_the_right_role_a_server_is_closed(run_dir: Path, tmp_path: Path, role: Role) -> None:
    async with joined(run_dir, tmp_path, role) as host:
        rules = access(host)
        for token in ("", OWN, engine_token(OWN, "engine-7"), host.keys.new("worker-7", Role.WORKER).token):
            assert status(rules, token) == 401


async def test_a_server_whose_list_is_gone_does_not_open(run_dir: Path, tmp_path: Path) -> None:
    async with joined(run_dir, tmp_path) as host:
        rules = access(host)
        host.layout.http_tokens.unlink()
        assert status(rules, "") == 401
        with pytest.raises(MissingError, match=r"http_tokens\.json"):
            access(host)
