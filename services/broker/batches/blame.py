"""Blame: against which groups lost leases count.

A step is all that its trainer holds. Its loss counts as a failure of each of its groups; a suspect, one more failure of
which ends it, is a step of its own.

A window has many leases, which are lost together, and its trainer may need many suspects for one step. They are
delivered one by one, each in a lease of its own. A trainer that pulls again has survived what it got before, so the
loss counts against one suspect alone: the one delivered last. It is then accused, and delivered before everything else.
Only a group that its trainer held alone is at fault for certain, and only such a group ends.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rolloutmq.services.broker.batches.leases import Lease
from rolloutmq.services.broker.journal.stored_group import StoredGroup


class Loss(NamedTuple):
    """A lost lease, and whether that counts as a failure of its groups."""

    lease: Lease
    counts: bool


def losses(leases: Sequence[Lease], suspected: Callable[[StoredGroup], bool], *, failed: bool) -> list[Loss]:
    """Return leases that are lost together, in the order to lose them in: what is lost last comes again first.

    Args:
        leases: A step, or the leases of a window, oldest first.
        suspected: Whether one more failure ends a group.
        failed: Whether their trainer was lost, rather than giving them back.
    """
    newest_first = list(leases)[::-1]
    if not failed or not all(lease.window for lease in leases):
        return [Loss(lease, failed) for lease in newest_first]
    last = next((lease for lease in newest_first if lease.delivered), None)
    found = []
    accused = None
    for lease in newest_first:
        suspect = any(map(suspected, lease.groups))
        loss = Loss(lease, lease.delivered and (lease is last or not suspect))
        if suspect and loss.counts:
            accused = loss
        else:
            found.append(loss)
    return [*found, accused] if accused is not None else found


def certain(leases: Sequence[Lease]) -> bool:
    """Return whether a lost trainer held what is at fault, and nothing else."""
    if not all(lease.window for lease in leases):
        return True
    return sum(len(lease.parts[0].groups) for lease in leases if lease.delivered) == 1
