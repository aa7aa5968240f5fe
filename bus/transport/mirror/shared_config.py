"""The part of a configuration that other hosts get: what their workers, engines and ranks need. Pure.

Left out are secrets, paths of the run's host, addresses that only its own servers bind, and programs (`command`), which
a host that joins does not run. A model by `path` is told as `MODEL_PATH`: the other host has its tokenizer under a path
of its own. Values of `options` are told as they are written: `env:NAME` stays a reference.
"""

import json
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from rolloutmq.schemas.config.run import RunConfig

MODEL_PATH: Final = "model"
"""Stands for a model by path."""
_SECTIONS: Final[dict[str, set[str] | None]] = {
    "run": {"name", "seed", "log_bytes", "log_files"},
    "broker": {"high_bytes", "high_groups", "max_group_bytes", "lease_s", "silence_s"},
    "environment": None,
    "curriculum": None,
    "inference": {"kind", "url", "max_batch", "max_waiting", "min_engines", "max_engines"},
    "model": None,
    "trainer": None,
    "weights": {"backend", "insecure"},
    "teacher": {"name", "retry_s", "attempts"},
    "evaluation": None,
    "orchestrator": {
        *("enabled", "backoff_s", "backoff_max_s", "crash_limit", "stable_s"),
        *("drain_deadline_s", "end_deadline_s", "term_grace_s"),
    },
    "telemetry": {"interval_s", "latencies", "trace_ratio"},
}
"""Told keys by section; None: all."""


def shared(config: RunConfig) -> bytes:
    """Return the JSON of a configuration that another host may have; it is itself a valid configuration."""
    told: dict[str, Any] = {}
    for name, keys in _SECTIONS.items():
        section = getattr(config, name)
        if isinstance(section, dict):
            told[name] = {key: one.model_dump(mode="json") for key, one in section.items()}
        else:
            told[name] = section.model_dump(mode="json", include=keys)
    programs = {name for name, env in config.environment.items() if env.command}
    told["environment"] = {name: env for name, env in told["environment"].items() if name not in programs}
    inference, model, teacher = told["inference"], told["model"], told["teacher"]
    inference["url"] = _without_login(inference["url"])
    if model["path"]:
        model["path"], model["tokenizer"], model["revision"] = MODEL_PATH, "", ""
    if config.teacher.path:
        teacher["path"] = MODEL_PATH  # its address is in a file, as on the run's own host
    teacher["url"] = _without_login(config.teacher.url)
    return json.dumps(told, sort_keys=True).encode()


def _without_login(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
