"""Helpers for the tests of one's own environment and trainer, without a server, a model or a run.

`ScriptedPolicy` answers from a script, `play` and `roll_out` run an environment on it, `LocalBroker` is a real broker
in this process, and `assert_nothing_lost` and `assert_settled` hold its ledger against the expectation of a test.
Nothing here imports pytest; `rolloutmq.testing.fixtures` is a plugin for it.

Each name is loaded on first use: the test of an environment loads no broker.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolloutmq.services.worker.scripted import Answer, RecordedCall, ScriptedPolicy, play
    from rolloutmq.testing.broker import LocalBroker
    from rolloutmq.testing.ledger import Ledger, assert_nothing_lost, assert_settled, read_ledger
    from rolloutmq.testing.rollouts import roll_out, roll_out_async

__all__ = [
    "Answer",
    "Ledger",
    "LocalBroker",
    "RecordedCall",
    "ScriptedPolicy",
    "assert_nothing_lost",
    "assert_settled",
    "play",
    "read_ledger",
    "roll_out",
    "roll_out_async",
]

_SCRIPTED = "rolloutmq.services.worker.scripted"
_LEDGER = "rolloutmq.testing.ledger"
_ROLLOUTS = "rolloutmq.testing.rollouts"
_HOME_OF = {
    "Answer": _SCRIPTED,
    "Ledger": _LEDGER,
    "LocalBroker": "rolloutmq.testing.broker",
    "RecordedCall": _SCRIPTED,
    "ScriptedPolicy": _SCRIPTED,
    "assert_nothing_lost": _LEDGER,
    "assert_settled": _LEDGER,
    "play": _SCRIPTED,
    "read_ledger": _LEDGER,
    "roll_out": _ROLLOUTS,
    "roll_out_async": _ROLLOUTS,
}


if not TYPE_CHECKING:  # seen by a type checker, it would stand for every misspelled name

    def __getattr__(name: str) -> Any:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'rolloutmq.testing' has no attribute {name!r}")
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
