"""The run's own token for its HTTP servers: of the file that the configuration names, or made for a run with keys.

The run's own processes on its own host send it. It never leaves this host: other hosts have the tokens of their keys,
and an engine there gets a token that is made from the run's and opens the engines of its key alone.
"""

import base64
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from rolloutmq.bus.files import create_private, open_regular
from rolloutmq.bus.transport.keys.directory import TOKEN_BYTES
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~-]{16,}")
"""Characters that need no quoting in a path."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def http_token(run: RunConfig) -> str:
    """Return the token of a run's servers, empty if it has none.

    Raises:
        ConfigError: The file cannot be read, is not private to this user, or has no such token.
    """
    if run.run.http_token_file is None:
        return ""
    path = run.base_dir / run.run.http_token_file
    try:
        with open_regular(path) as file:
            _require_secret(path, os.fstat(file.fileno()))
            token = file.read().decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("run.http_token_file", f"cannot be read: {error}") from None
    if _TOKEN.fullmatch(token) is None:
        raise ConfigError(
            "run.http_token_file",
            f"{path} must have one line, of at least 16 letters, digits, `-`, `.`, `_` or `~` "
            f"(got {len(token)} characters); make one: (umask 077; openssl rand -hex 32 > {path})",
        )
    return token


def engine_token(own: str, key: str) -> str:
    """Return what processes of the run's host send to engines of other hosts.

    Args:
        own: The run's own token; empty if there is none.
        key: Name of the engines' key; empty for engines without one, which get nothing.
    """
    if not own or not key:
        return ""
    made = hmac.digest(own.encode(), f"engines of key {key}".encode(), "sha256")
    return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def with_own_token(run: RunConfig, layout: RunLayout) -> RunConfig:
    """Return the configuration with a token of the run itself, if it has keys and names none. An earlier life's stays.

    Raises:
        OSError: It cannot be written.
    """
    if not run.broker.keys or run.run.http_token_file is not None:
        return run
    path = layout.http_token.absolute()
    if not path.exists():
        create_private(path, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode())
    return run.model_copy(update={"run": run.run.model_copy(update={"http_token_file": path})})


def _require_secret(path: Path, found: os.stat_result) -> None:
    """Require that a file with a token belongs to this user, and that nobody else may open it."""
    user = os.geteuid()
    if found.st_uid != user:
        raise ConfigError(
            "run.http_token_file",
            f"{path} must belong to this user, {user} (got user {found.st_uid}); use a file of your own",
        )
    if found.st_mode & _OTHERS:
        raise ConfigError(
            "run.http_token_file",
            f"{path} must be closed to other users (got mode {stat.S_IMODE(found.st_mode):04o}); "
            f"run chmod 600 {path}, and write another token if they may know this one",
        )
