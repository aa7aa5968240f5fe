"""Texts of `[environment.NAME]` that stand for others: placeholders and secrets. Pure: the caller passes the values.

`{worker}` in an argument stands for the name of the worker that runs it. Only a lower-case word in braces is a
placeholder, so that JSON passes unchanged; `{{worker}}` stands for the text `{worker}`.

`env:NAME` as a whole value of `options` or `variables` stands for the environment variable NAME, a secret. The
configuration, files, messages and errors of a run have the reference. Only the process that uses the value looks it up.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

PLACEHOLDERS: Final = {
    "worker": "Name of the worker, `NAME-NUMBER`; a restart keeps it.",
    "number": "Number of the worker.",
    "environment": "Name of the environment.",
    "gateway_url": "Base URL of the gateway for this worker: Atropos' `rollout_server_url`.",
    "inference_url": "Base URL of the run's inference server, with `/v1`.",
    "run_dir": "Run directory, absolute.",
    "seed": "`run.seed` plus the number of the worker.",
    "group_size": "`group_size` of the environment.",
    "concurrency": "`concurrency` of the environment: Atropos' `max_num_workers`.",
    "enough_batches": "`enough_batches` of the environment: Atropos' `max_batches_offpolicy`.",
}
"""Placeholders with their meanings."""

_REFERENCE: Final = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_PLACEHOLDER: Final = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)\}")


def placeholders_of(texts: Iterable[str]) -> list[str]:
    """Return the names of all placeholders, in order."""
    return [found[2] for text in texts for found in _PLACEHOLDER.finditer(text) if found[2]]


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of its placeholders; KeyError for an unknown one."""
    return _PLACEHOLDER.sub(lambda found: f"{{{found[1]}}}" if found[1] else values[found[2]], text)


def problem_of_placeholders(texts: Iterable[str]) -> str:
    """Return the problem of the first unknown placeholder, or an empty text."""
    for name in placeholders_of(texts):
        if name not in PLACEHOLDERS:
            close = difflib.get_close_matches(name, PLACEHOLDERS, n=1)
            hint = f"did you mean `{{{close[0]}}}`? " if close else ""
            allowed = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            return f"has the unknown placeholder `{{{name}}}`; {hint}allowed: {allowed}"
    return ""


def secrets_in(value: Any) -> Iterator[str]:
    """Yield the names of all variables that a value refers to, at any depth of lists and tables."""
    if isinstance(value, str):
        if found := _REFERENCE.fullmatch(value):
            yield found[1]
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from secrets_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from secrets_in(inner)


def problem_of_secrets(value: Any, environ: Mapping[str, str]) -> str:
    """Return the problem of the first reference without a variable, or an empty text."""
    for name in secrets_in(value):
        if name not in environ:
            return (
                f"`env:{name}` names an environment variable that is not set; export {name} before the start"
            )
    return ""


def resolved(value: Any, environ: Mapping[str, str]) -> Any:
    """Return the value with the variables in place of their references; KeyError for one that is not set."""
    if isinstance(value, str):
        found = _REFERENCE.fullmatch(value)
        return environ[found[1]] if found else value
    if isinstance(value, Mapping):
        return {key: resolved(inner, environ) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(inner, environ) for inner in value]
    return value
