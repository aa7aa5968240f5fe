"""Where a relay gets the weights: from the relay of a run of another host, or of a run directory of this host.

The broker of another host knows the port of its relay, and makes a ticket for the name of the key that asks. The host
is the one by which this host reaches the broker. A relay of a third host that serves others has told the broker its
address. A sender without the secret of the ticket is refused.
"""

from typing import Final, Protocol

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys import ticket
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.mirror.place import host_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import MalformedError, WeightsNotSentError
from rolloutmq.schemas.files import RunLayout, StreamAddress
from rolloutmq.schemas.wire.joining import GetWeightsTicket, WeightsTicket
from rolloutmq.trainer.weights.stream.channel import Channel

ANSWER_S: Final = 3.0
"""Silence of the broker after which the relay tries again."""


class Source(Protocol):
    """Where a relay gets the weights."""

    def dial(self) -> Channel:
        """Connect to the sender with a fresh ticket; raises RolloutMQError if that fails, to be tried again."""
        ...


class RunSource:
    """The sender of a run directory that this host can read.

    Args:
        layout: The run directory.
        name: Name of this receiver in the sender's log.
    """

    def __init__(self, layout: RunLayout, name: str) -> None:
        self._layout = layout
        self._name = name

    def dial(self) -> Channel:
        """See `Source.dial`."""
        try:
            found = read_json(self._layout.stream, StreamAddress)
        except msgspec.DecodeError as error:
            raise MalformedError(f"{self._layout.stream}: {error}") from None
        if found is None:
            raise WeightsNotSentError(
                "from", f"{self._layout.stream} is not there; no relay serves it", away=True
            )
        shown = ticket.issue(found.secret, self._name)
        return Channel.dial(found.host, found.port, shown, sealed=found.sealed)


class BrokerSource:
    """The sender of a run of another host.

    Args:
        layout: Directory of this host for the run. Its `endpoints.json` and key are read again for each ticket.
        relay: A relay of a third host that sends the weights; empty for that of the run.
    """

    def __init__(self, layout: RunLayout, relay: str = "") -> None:
        self._layout = layout
        self._relay = relay

    def dial(self) -> Channel:
        """See `Source.dial`. Blocks for up to `ANSWER_S` and the time limits of the handshake.

        Raises:
            BrokerUnavailableError, RefusedError: The broker does not answer, or gives no ticket.
            MissingError, NotPrivateError, ConfigError, UnusablePathError: The key cannot be used.
            WeightsNotSentError, MalformedError: See `Channel.dial`.
        """
        found = read_endpoints(self._layout.root)
        if found is None:
            raise WeightsNotSentError("from", "the broker's addresses are not there yet", away=True)
        with BlockingClient(found.serve, keys=keys_of(found)) as client:
            reply = client.request(GetWeightsTicket(relay=self._relay), ANSWER_S)
        if not isinstance(reply, WeightsTicket):
            raise MalformedError(f"wrong type of reply to GetWeightsTicket (got {type(reply).__name__})")
        # Whether to encrypt is the run's choice. Nobody between changes it: the reply comes from the broker's key, and
        # the proof of the ticket covers the sender's answer.
        host = reply.host or host_of(found.serve).strip("[]")
        shown = ticket.Pass(reply.shown, reply.key)
        return Channel.dial(host, reply.port, shown, sealed=reply.sealed)
