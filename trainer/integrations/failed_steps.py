"""The groups of a step that failed, named in its error.

A trainer that crashes at a group gets it again, and after `broker.max_deliveries` - 1 crashes alone. If it takes a
window of groups, the broker cannot tell at which of them its step crashes, so the error names them all.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

from rolloutmq.schemas.errors import RolloutMQError

logger = logging.getLogger(__name__)

Groups = Callable[[], tuple[int, Sequence[str]]]
"""Returns the number of the step under way and the ids of its groups; no ids while there is none."""


@contextmanager
def naming_groups(groups: Groups) -> Iterator[None]:
    """Add the groups of the step to an error of the trainer's that ends the block, and log them.

    Errors of this package are about the bus, and pass as they are.
    """
    try:
        yield
    except RolloutMQError:
        raise
    except Exception as error:
        with suppress(RolloutMQError):  # the bus is left
            step, names = groups()
            if names:
                note = (
                    f"Step {step} failed with the groups {', '.join(names)}; `rolloutmq explain` shows each."
                )
                logger.error("step failed step=%d groups=%s", step, ",".join(names))
                error.add_note(note)
        raise


def name_groups_in(owner: Any, method: str, groups: Groups) -> None:
    """Let a method of an object name the groups of the step in its errors."""
    whole = getattr(owner, method)

    @wraps(whole)
    def named(*args: Any, **kwargs: Any) -> Any:
        with naming_groups(groups):
            return whole(*args, **kwargs)

    setattr(owner, method, named)
