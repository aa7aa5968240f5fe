"""The table of paths and roles has every path of every server, and no other."""

from pathlib import Path
from typing import Any

import pytest

from rolloutmq.schemas.config.distillation import TeacherConfig
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.dashboard.app import API, DashboardApp
from rolloutmq.services.dashboard.entry.sessions import Sessions
from rolloutmq.services.gateway.app import BATCH, GatewayApp
from rolloutmq.services.http_server.access import HttpAccess
from rolloutmq.services.http_server.roles import PATHS, Server, refusal, roles_of
from rolloutmq.services.inference.app import InferenceApp
from rolloutmq.services.inference.teacher.server import TeacherServer
from rolloutmq.services.telemetry.export.prometheus.endpoint import PATH

NOTHING: Any = None


class Engine(InferenceApp):
    policy = NOTHING
    busy_s = 0.0

    async def sample(self, job: Any) -> None:
        raise NotImplementedError


def gateway() -> set[str]:
    app = GatewayApp(NOTHING, GatewayConfig(), HttpAccess())
    app.close()
    return {*app._routes, BATCH}


def page(root: Path) -> set[str]:
    return set(DashboardApp(RunLayout(root), HttpAccess(), Sessions(), 1)._routes)


def test_every_path_of_every_server_is_in_the_table(tmp_path: Path) -> None:
    assert set(PATHS[Server.GATEWAY]) == gateway()
    assert set(PATHS[Server.ENGINE]) == set(Engine()._routes)
    assert set(PATHS[Server.TEACHER]) == set(TeacherServer(NOTHING, NOTHING, TeacherConfig())._routes)
    assert set(PATHS[Server.METRICS]) == {PATH}
    for path in page(tmp_path) - {"/", "/api/session"}:  # these two tell nothing of the run
        assert path.startswith(API)
        assert roles_of(Server.PAGE, path) == {Role.MONITOR}
    assert set(PATHS) == set(Server)


@pytest.mark.parametrize(
    ("server", "path", "roles"),
    [
        (Server.GATEWAY, "/scored_data", "worker"),
        (Server.GATEWAY, "/batch", "trainer"),
        (Server.GATEWAY, "/reset_data", ""),
        (Server.GATEWAY, "/metrics", "monitor"),
        (Server.ENGINE, "/v1/completions", "engine worker"),
        (Server.ENGINE, "/health", "engine monitor trainer worker"),
        (Server.TEACHER, "/v1/token_logprobs", "engine trainer worker"),
        (Server.METRICS, "/metrics", "monitor"),
        (Server.PAGE, "/api/dead/g1", "monitor"),
        (Server.PAGE, "/api/actions/drain", ""),
    ],
)
def test_a_role_has_its_paths_and_admins_have_all(server: Server, path: str, roles: str) -> None:
    allowed = {role for role in Role if not refusal("k", role, server, "GET", path)}
    assert allowed == {*map(Role, roles.split()), Role.ADMIN}


def test_a_path_that_does_not_exist_is_refused_by_its_server_alone() -> None:
    assert refusal("k", Role.MONITOR, Server.GATEWAY, "GET", "/nothing") == ""
