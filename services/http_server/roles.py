"""What the holder of each role may do at the HTTP servers of a run: a table of their paths.

A path that is not in the table is refused to nobody: it does not exist, and its server says so. Admins may do
everything. Pure.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.distillation import TEACH_PATH

_ALL: Final = frozenset(Role)
_NONE: Final = frozenset[Role]()
_WORKER: Final = frozenset({Role.WORKER})
_TRAINER: Final = frozenset({Role.TRAINER})
_MONITOR: Final = frozenset({Role.MONITOR})
_SAMPLING: Final = frozenset({Role.WORKER, Role.ENGINE})
_PARTIES: Final = frozenset({Role.WORKER, Role.TRAINER, Role.MONITOR})


class Server(StrEnum):
    """A kind of HTTP server."""

    GATEWAY = "gateway"
    ENGINE = "engine"
    TEACHER = "teacher"
    METRICS = "metrics"
    PAGE = "page"


PATHS: Final[Mapping[Server, Mapping[str, frozenset[Role]]]] = {
    Server.GATEWAY: {
        "/": _ALL,
        "/health": _ALL,
        "/docs": _ALL,
        "/openapi.json": _ALL,
        "/info": _PARTIES,
        "/wandb_info": _PARTIES,
        "/status": _PARTIES,
        "/register-env": _WORKER,
        "/disconnect-env": _WORKER,
        "/status-env": _WORKER,
        "/scored_data": _WORKER,
        "/scored_data_list": _WORKER,
        "/register": _TRAINER,
        "/batch": _TRAINER,
        "/reset_data": _NONE,
        "/latest_example": _MONITOR,
        "/global-status": _MONITOR,
        "/metrics": _MONITOR,
    },
    Server.ENGINE: {
        "/v1/completions": _SAMPLING,
        "/v1/chat/completions": _SAMPLING,
        "/inference/v1/generate": _SAMPLING,
        "/tokenize": _SAMPLING,
        "/detokenize": _SAMPLING,
        "/v1/models": _ALL,
        "/health": _ALL,
    },
    Server.TEACHER: {
        TEACH_PATH: _SAMPLING | _TRAINER,
        "/v1/models": _ALL,
        "/health": _ALL,
    },
    Server.METRICS: {"/metrics": _MONITOR},
    Server.PAGE: {"/api/": _MONITOR, "/api/actions/": _NONE},
}
"""Roles besides admin, by server and path; a path that ends with `/` stands for all below it."""


def roles_of(server: Server, path: str) -> frozenset[Role]:
    """Return the roles that may use a path, besides admin."""
    paths = PATHS[server]
    if path in paths:
        return paths[path]
    above = [one for one in paths if one != "/" and one.endswith("/") and path.startswith(one)]
    return paths[max(above, key=len)] if above else _ALL


def refusal(name: str, role: Role, server: Server, asked: str, path: str) -> str:
    """Return why a key may not send a request; empty if it may.

    Args:
        name: Name of the key.
        role: Its role.
        server: Where the request is.
        asked: Its method.
        path: Its path, without a token.
    """
    roles = roles_of(server, path)
    if role is Role.ADMIN or role in roles:
        return ""
    needed = " or ".join(sorted(wanted.value for wanted in roles | {Role.ADMIN}))
    return f"key {name} (role {role.value}) may not {asked} {path}; use a key of role {needed}"
