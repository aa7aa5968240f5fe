"""Ensembles of an environment in a run: their shared windows, and the way of their findings to the bus.

Every attribute of the environment, or of its class, that is an `Ensemble` shares one window with the other workers of
that environment on this host: `ratings/ENV.ATTRIBUTE.window` in the run directory. Findings are published on
`telemetry.health.ENV` and logged. Publishing drops instead of blocking: the log of the worker has them all.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.files import PRIVATE_DIRECTORY
from rolloutmq.bus.transport.pubsub import RunPublisher
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.rewards.ensemble import Ensemble, FindingLog

logger = logging.getLogger(__name__)


def ensembles_of(environment: Any) -> dict[str, Ensemble]:
    """Return the ensembles among the attributes of an object and of its class, by attribute."""
    found: dict[str, Ensemble] = {}
    for namespace in (*map(vars, reversed(type(environment).__mro__)), getattr(environment, "__dict__", {})):
        found |= {name: value for name, value in namespace.items() if isinstance(value, Ensemble)}
    return found


@contextmanager
def joined(environment: Any, env: str, worker: str, layout: RunLayout) -> Iterator[None]:
    """Let the ensembles of an environment take part in a run within the block. The broker must be up."""
    ensembles = ensembles_of(environment)
    if not ensembles:
        yield
        return
    layout.ratings.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    outlet = FindingOutlet(layout)
    try:
        for attribute, ensemble in ensembles.items():
            window = layout.ratings / f"{env}.{attribute}.window"
            ensemble.join_run(env, worker, window, outlet.tell)
        yield
    finally:
        outlet.close()
        for attribute, ensemble in ensembles.items():
            _log_costs(attribute, ensemble)


def _log_costs(attribute: str, ensemble: Ensemble) -> None:
    for name, cost in ensemble.costs().items():
        logger.info(
            "rater ended ensemble=%s rater=%s calls=%d retries=%d failed=%d timed_out=%d invalid=%d refused=%d "
            "rated=%d missing=%d seconds=%.1f cost=%g last_error=%s",
            *(attribute, name, cost.calls, cost.retries, cost.failed, cost.timed_out, cost.invalid),
            *(cost.refused, cost.rated, cost.missing, cost.seconds, cost.cost, cost.error or "none"),
        )


class FindingOutlet:
    """Publishes findings through the broker of a run, wherever it is now. For one thread.

    It connects at once: what is published before a connection stands is dropped.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._publisher = RunPublisher(layout)
        self._log = FindingLog()
        self._publisher.follow()

    def tell(self, finding: HealthFinding) -> None:
        """Log a finding and publish it."""
        self._log.tell(finding)
        self._publisher.publish(topics.telemetry("health", finding.env), finding)

    def close(self) -> None:
        """Close the connection; the last findings have half a second to leave."""
        self._publisher.close()
