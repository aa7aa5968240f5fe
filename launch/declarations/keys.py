"""Commands below `rolloutmq keys`."""

from pathlib import Path
from typing import Annotated

import typer

from rolloutmq.launch.declarations.options import Json
from rolloutmq.schemas.network.keys import Role

keys = typer.Typer(help="Make and revoke the keys of clients on other hosts.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(help="Key directory, as in broker.keys.", show_default=False)]
KeyName = Annotated[str, typer.Argument(help="Name of the key.", show_default=False)]


@keys.command("init")
def keys_init(
    directory: Directory,
    tls: Annotated[
        list[str] | None,
        typer.Option(
            "--tls",
            metavar="HOST",
            help="Also make a certificate for the HTTP servers of this host, as `keys tls`; repeat it for other names.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Create a key directory, with the key of the broker."""
    from rolloutmq.launch.commands import keys

    raise typer.Exit(keys.init(directory, tls or []))


@keys.command("tls")
def keys_tls(
    directory: Directory,
    hosts: Annotated[
        list[str],
        typer.Argument(metavar="HOST...", help="Names and addresses of the servers.", show_default=False),
    ],
) -> None:
    """Make or renew the certificate of the HTTP servers of a run, by an authority of its own."""
    from rolloutmq.launch.commands import keys

    raise typer.Exit(keys.tls(directory, hosts))


@keys.command("new")
def keys_new(
    directory: Directory,
    name: KeyName,
    role: Annotated[Role, typer.Option(help="What its holder may do.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="File for the client.  [default: NAME.key]", show_default=False)
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            help="Certificates (PEM) by which the client trusts the HTTP servers of the run.  [default: those of "
            "`keys tls`]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make the key of a client, and write the file to carry to its host."""
    from rolloutmq.launch.commands import keys

    raise typer.Exit(keys.new(directory, name, role, out or Path(f"{name}.key"), ca))


@keys.command("list")
def keys_list(directory: Directory, as_json: Json = False) -> None:
    """List the keys of a directory, revoked ones included."""
    from rolloutmq.launch.commands import keys

    raise typer.Exit(keys.show(directory, as_json=as_json))


@keys.command("revoke")
def keys_revoke(directory: Directory, name: KeyName) -> None:
    """Revoke a key: running brokers refuse it within a second."""
    from rolloutmq.launch.commands import keys

    raise typer.Exit(keys.revoke(directory, name))
