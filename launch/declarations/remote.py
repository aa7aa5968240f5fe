"""Parameters by which a command means a run of another host, and the directory of such a run on this host."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutmq.launch.declarations.options import to_read

if TYPE_CHECKING:  # `--help` answers at once
    from rolloutmq.schemas.files import Connection

Connect = Annotated[
    list[str] | None,
    typer.Option(
        "--connect",
        metavar="tcp://HOST:PORT",
        help="Run of another host: its broker.listen. Repeat it for other addresses of the same broker.",
        show_default=False,
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key", help="Key for --connect, a file of `rolloutmq keys new`.", show_default=False, metavar="FILE"
    ),
]


def connection(addresses: Sequence[str], key: Path | None, asks: str) -> "Connection":
    """Return how this host reaches a run.

    Args:
        addresses: Addresses of its broker.
        key: File of the key, if any.
        asks: Type of the request that the command cannot do without.

    Raises:
        UsageError: An address is wrong.
        MissingError, NotPrivateError, ConfigError, UnusablePathError: The key cannot be used.
        RefusedError: A key of its role may not send that request.
    """
    from rolloutmq.bus.transport.keys.bundle import load_bundle
    from rolloutmq.bus.transport.remote import require_tcp
    from rolloutmq.schemas.errors import RefusedError
    from rolloutmq.schemas.files import Connection
    from rolloutmq.schemas.wire.envelope import ErrorCode
    from rolloutmq.services.broker.requests.roles import REQUESTS, refusal

    for address in addresses:
        require_tcp(address)
    if key is not None:
        bundle = load_bundle(key.absolute())
        # The broker would say so too, but again and again, to a process that nobody looks at.
        if why := refusal(bundle.name, bundle.role, {one.__name__: one for one in REQUESTS}[asks]):
            raise RefusedError(ErrorCode.FORBIDDEN, why)
    return Connection(addresses=tuple(addresses), key=str(key.absolute()) if key is not None else "")


def mirrored(connect: list[str] | None, key: Path | None, *runs: Path | None, asks: str) -> Path | None:
    """Return a directory that is kept like that of the run of `--connect` until this process ends; None without it.

    Raises:
        BadParameter: A run directory is named too, or a key without an address.
        BrokerUnavailableError: The run does not answer.
        RefusedError: A key of this role may not send a request of the type `asks`.
    """
    if not connect:
        if key is not None:
            raise typer.BadParameter("needs --connect, the address of the run", param_hint="--key")
        return None
    if named := next((run for run in runs if run is not None), None):
        raise typer.BadParameter(
            f"names another run than the run directory ({named}); name one", param_hint="--connect"
        )
    from rolloutmq.launch.commands.remote.view import mirrored_view

    return mirrored_view(connection(connect, key, asks))


def shown(
    connect: list[str] | None, key: Path | None, option: Path | None, argument: Path | None = None
) -> Path:
    """Return the directory of the run that a command reads: of `--connect`, else as `to_read`."""
    return mirrored(connect, key, option, argument, asks="GetStatus") or to_read(option, argument)


def refuse_logs(connect: list[str] | None, name: str) -> None:
    """Refuse to show a log of a run of another host: it does not leave that host.

    Raises:
        MissingError: Such a run was named.
    """
    if connect:
        from rolloutmq.schemas.errors import MissingError

        remedy = "read it on the host of the process: `rolloutmq logs` with the run directory there"
        raise MissingError(f"the log of {name}", remedy, "is not on this host, and logs are not sent")
