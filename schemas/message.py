"""What every control message has in common.

A message is one frozen class; its `kind` travels as a tag, unknown fields and kinds are refused, and requests,
replies and events are separate unions that a reader can match exhaustively. Only the data plane's `Envelope` is not a
`Message`: it has its own, tighter form.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all control messages: a msgpack map with a `kind`."""
