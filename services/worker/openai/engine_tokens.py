"""The token that a worker sends to each engine.

On the run's own host it is the run's, which leaves this host never: an engine of another host gets a token that opens
the engines of its key alone. A worker that has joined sends the token of its own key everywhere.

`Policy.endpoint` gives code of environments a URL with the token, and their clients log URLs. The log of the worker
hides it.
"""

from typing import Final

from rolloutmq.bus.engine_registry import is_of_other_host
from rolloutmq.bus.lifecycle import hide
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.http_server.run_token import engine_token, http_token
from rolloutmq.services.worker.openai.client import TokenOf
from rolloutmq.services.worker.openai.engine_choice import Engine

HIDDEN: Final = "TOKEN"
"""Stands for a token in the log."""


def token_of(run: RunConfig, layout: RunLayout) -> TokenOf:
    """Return which token each engine of a run gets; none gets one if the engines are not the run's.

    Raises:
        ConfigError: There is no token in `run.http_token_file`.
    """
    token = "" if run.inference.kind == "external" else http_token(run)
    hide(token, HIDDEN)
    if layout.connection.exists():
        return lambda _: token
    made: dict[str, str] = {}

    def of(engine: Engine) -> str:
        if not is_of_other_host(engine.name):
            return token
        if engine.key not in made:
            made[engine.key] = engine_token(token, engine.key)
            hide(made[engine.key], HIDDEN)
        return made[engine.key]

    return of
