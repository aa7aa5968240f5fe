"""The identity of a run: a random id, made when its broker first starts in a run directory.

    identity.json   of the run: whoever resumes the directory has the same id, a fresh run in its place another one
                    of another host: the run whose files are in that directory

Runs may share name, configuration and address, one after the other. What belongs to one of them names its id: the
addresses of the broker, registrations of producers and consumers, heartbeats of engines and relays, offers of weights.
"""

import os

import msgspec

from rolloutmq.bus.files import create_private
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.errors import DamagedFileError
from rolloutmq.schemas.files import RunIdentity, RunLayout


def made_run_id(layout: RunLayout) -> str:
    """Return the id of the run in a directory; make it if this is its first start. For the broker that owns it.

    Raises:
        DamagedFileError: The file is damaged.
        OSError: It cannot be read or written.
    """
    if not layout.identity.exists():
        create_private(layout.identity, msgspec.json.encode(RunIdentity(run_id=os.urandom(16).hex())) + b"\n")
    found = run_id_of(layout)
    if not found:
        remedy = "restore it, or remove it if no other host takes part in the run"
        raise DamagedFileError(str(layout.identity), 1, f"is no id of a run; {remedy}")
    return found


def run_id_of(layout: RunLayout) -> str:
    """Return the id of the run whose files are in a directory; empty if none is known, or the file is damaged."""
    try:
        found = read_json(layout.identity, RunIdentity)
    except msgspec.DecodeError:
        return ""
    return found.run_id if found is not None else ""


def short(run_id: str) -> str:
    """Return the id as logs and names of directories have it."""
    return run_id[:8]
