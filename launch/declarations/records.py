"""Commands below `rolloutmq ledger` and `rolloutmq dead`."""

from typing import Annotated

import typer

from rolloutmq.launch.declarations.options import (
    GroupId,
    Json,
    ReadArgument,
    ReadOption,
    RunOption,
    answered,
    to_change,
    to_read,
)

ledger = typer.Typer(help="Audit the ledger of accepted groups.", no_args_is_help=True)
dead = typer.Typer(help="Inspect dead-lettered groups, or queue them again.", no_args_is_help=True)


@ledger.command("verify")
def ledger_verify(
    run_dir: ReadArgument = None,
    run: ReadOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip reading and checksumming the groups.")] = False,
    as_json: Json = False,
) -> None:
    """Recompute the ledger of a run from its files, and name every group it cannot account for."""
    from rolloutmq.launch.commands.records import ledger

    raise typer.Exit(ledger.verify(to_read(run, run_dir), as_json=as_json, quick=quick))


@dead.command("list")
def dead_list(run_dir: ReadArgument = None, run: ReadOption = None, as_json: Json = False) -> None:
    """List dead groups."""
    from rolloutmq.launch.commands.records import dead

    raise typer.Exit(dead.show_list(to_read(run, run_dir), as_json=as_json))


@dead.command("show")
def dead_show(group_id: GroupId, run_dir: ReadOption = None, as_json: Json = False) -> None:
    """Show a dead group: reason, history and columns."""
    from rolloutmq.launch.commands.records import dead

    raise typer.Exit(dead.show(to_read(run_dir), group_id, as_json=as_json))


@dead.command("requeue")
def dead_requeue(
    group_ids: Annotated[list[str] | None, typer.Argument(help="Group ids.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Requeue all dead groups.")] = False,
    run_dir: RunOption = None,
    as_json: Json = False,
) -> None:
    """Queue dead groups again in the running broker, with their failure counts reset."""
    from rolloutmq.launch.commands.records import dead

    where = to_change(run_dir)
    raise typer.Exit(answered(lambda: dead.requeue(where, group_ids or [], every=every), as_json=as_json))
