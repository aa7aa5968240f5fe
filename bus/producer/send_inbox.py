"""Groups between the callers of a blocking producer and its event loop.

If each `send` waited for the loop, it would cost two changes of threads, more than a small group itself. So a group for
which there seems to be credit waits here, and the loop takes all groups of the inbox in one turn. Only the loop gives
out credit, so it is exact. A group that finds none any more stays here, ahead of all that wait, until there is some.

Callers hold no lock: a signal handler may send while its own thread does, and a forked child inherits none. Appending
to a deque, and removing from it, are atomic.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from rolloutmq.bus.encoding.codec import PreparedGroup
from rolloutmq.schemas.errors import ClosedError
from rolloutmq.schemas.group import Group

INBOX_GROUPS: Final = 64
"""Most groups in the inbox, and one for each further thread that sends."""
INBOX_BYTES: Final = 1 << 20
"""Most bytes in it, if its groups are of equal size; a larger group is worth a change of threads."""


class SentGroup(NamedTuple):
    """A group in the inbox."""

    group: Group
    prepared: PreparedGroup


class SendInbox:
    """Groups that callers have sent and the loop has not taken yet.

    Args:
        may_take: Returns whether so many more groups, the last of so many bytes, would enter the spool at once. Any
            thread asks, so the answer may be old.
        take: Puts a group into the spool and returns True, or False without credit. With `force` credit does not
            matter: the session ends, and the group is saved or reported. Runs in the loop.
        post: Makes the loop call a function soon, or raises ClosedError.
    """

    def __init__(
        self,
        may_take: Callable[[int, int], bool],
        take: Callable[[SentGroup, bool], bool],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._may_take = may_take
        self._take = take
        self._post = post
        self._groups: deque[SentGroup] = deque()
        self._posted = False
        """The loop will pour."""
        self._sealed = False

    def __len__(self) -> int:
        """Number of groups; while the loop takes one, it counts here and in the spool."""
        return len(self._groups)

    def offer(self, group: Group, prepared: PreparedGroup) -> bool:
        """Put a group into the inbox, unless it is full or the group would wait; any thread may call.

        Raises:
            ClosedError: The producer is closed; the group is not in the inbox.
        """
        number = len(self._groups)
        if number >= INBOX_GROUPS or number * prepared.nbytes > INBOX_BYTES or prepared.nbytes > INBOX_BYTES:
            return False
        if self._sealed or not self._may_take(number + 1, prepared.nbytes):
            return False
        sent = SentGroup(group, prepared)
        self._groups.append(sent)
        if not self._posted:
            self._posted = True
            try:
                self._post(self.pour)
            except ClosedError:
                self._sealed = True
        if self._sealed:
            self._withdraw(sent)
        return True

    def _withdraw(self, sent: SentGroup) -> None:
        """Raise ClosedError, unless the loop has taken the group."""
        with suppress(ValueError):
            self._groups.remove(sent)
            raise ClosedError

    def pour(self) -> None:
        """Let the loop take the groups for which there is credit; runs in the loop."""
        self._posted = False
        while self._groups and self._take(self._groups[0], False):
            self._groups.popleft()

    def pour_all(self) -> None:
        """Let the loop take all groups, whatever the credit; runs in the loop."""
        with suppress(IndexError):
            while True:
                self._take(self._groups.popleft(), True)

    def seal(self) -> None:
        """Refuse further groups, and let the loop take the last ones; runs in the loop."""
        self._sealed = True
        self.pour_all()
