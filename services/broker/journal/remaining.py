"""Which groups a broker would go on with: those that its journal names and that are not settled for good."""

from pathlib import Path

from rolloutmq.services.broker.journal.accounts import Accounts
from rolloutmq.services.broker.journal.history import History, unlogged


def remaining_ids(journal: Path) -> list[str]:
    """Return the ids of the groups that are queued, leased, or wait for a checkpoint or a trainer to come back.

    Args:
        journal: The directory; of a broker that lives, the answer is that of a moment ago.
    """
    accounts = Accounts()
    for chapter in History(journal).chapters():
        accounts = Accounts()
        accounts.open(chapter.snapshot)
        for commit in chapter.commits:
            for fact in commit.facts:
                accounts.apply(fact)
    for accepted in unlogged(journal, accounts.highest, accounts.last_segment):
        accounts.accept(accepted)
    return [accounts.ids[order] for order in sorted(accounts.places())]
