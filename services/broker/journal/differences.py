"""What a snapshot has otherwise than the facts before it."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from rolloutmq.services.broker.journal.books import Back, Books, Held, Problem
from rolloutmq.services.broker.ledger import State


def differences(accounts: Books, later: Books, log: str) -> Iterator[Problem]:
    """Yield what a snapshot has otherwise than the facts before it."""
    here, there = accounts.places(), later.places()
    for order in sorted(here.keys() | there.keys()):
        was, found = here.get(order), there.get(order)
        if was == found:
            continue
        group = (accounts.known.get(order) or later.known[order]).header.group_id
        if was is None and order not in accounts.states:
            what = f"is {found} in {log}, and was never accepted"
        else:
            what = f"was {was or accounts.states[order].value} before {log}, and is {found or 'not'} in it"
        yield Problem(what, group, order)
    for what in _other_batches(accounts, later):
        yield Problem(f"the batches {what} in {log} are not those of the facts before it")
    for name, mine, theirs in _figures(accounts, later):
        if mine != theirs:
            yield Problem(f"the ledger in {log} has {theirs} {name}, by the facts before it there are {mine}")


def _figures(accounts: Books, later: Books) -> Iterator[tuple[str, int, int]]:
    mine, theirs = accounts.counts(), later.counts()
    yield "accepted", accounts.accepted, later.accepted
    yield from ((state.value, mine[state], theirs[state]) for state in State)
    yield "rewound", accounts.rewound, later.rewound
    yield "forgotten", accounts.forgotten, later.forgotten
    for why in sorted(accounts.reasons.keys() | later.reasons.keys()):
        yield why, accounts.reasons[why], later.reasons[why]


def _other_batches(accounts: Books, later: Books) -> Iterator[str]:
    """Yield which batches differ: all must come again in the same composition and order."""
    if accounts.loans != later.loans:
        yield "leased"
    if _filled(accounts.kept) != _filled(later.kept):
        yield "kept"
    streams = {*accounts.returning, *later.returning}
    if not all(_same_queue(accounts.returning[one], later.returning[one]) for one in streams):
        yield "on the rewind queue"


def _filled(kept: Mapping[str, deque[Held]]) -> dict[str, deque[Held]]:
    return {group: batches for group, batches in kept.items() if batches}


def _same_queue(mine: Iterable[Back], theirs: Iterable[Back]) -> bool:
    """Whether two rewind queues hold the same batches; one that was lost may have come apart in the second."""
    others = deque(batch.orders for batch in theirs if batch.orders)
    for batch in mine:
        left = set(batch.orders)
        while left and others and left.issuperset(others[0]):
            left.difference_update(others.popleft())
            if not batch.lost:
                break
        if left:
            return False
    return not others
