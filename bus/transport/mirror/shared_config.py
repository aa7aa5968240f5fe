"""The part of a configuration that other hosts get: what their workers, engines and ranks need; and back. Pure.

Left out are secrets, paths of the run's host, addresses that only its own servers bind, and programs (`command`), which
a host that joins does not run. A model by `path` is told as `MODEL_PATH`: the other host has its tokenizer under a path
of its own. Values of `options` are told as they are written: `env:NAME` stays a reference.
"""

import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from rolloutmq.schemas.config.base import location_of, problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout

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


def told(data: bytes) -> RunConfig:
    """Decode a configuration from the wire.

    Raises:
        ConfigError: It is none of this version.
    """
    try:
        return RunConfig.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(location_of(first)) or "configuration"
        raise ConfigError(
            key,
            f"{problem_of(first)}; the run has another version of RolloutMQ than this host, or a damaged configuration",
        ) from None


def placed(config: RunConfig, layout: RunLayout, base_dir: Path, model: Path | None) -> RunConfig:
    """Return the configuration with the paths of this host."""
    run = config.run.model_copy(update={"dir": layout.root, "http_token_file": None})
    found = config.model
    if found.path:
        found = found.model_copy(update={"path": str(model or layout.model), "tokenizer": "", "revision": ""})
    return config.model_copy(update={"run": run, "base_dir": base_dir, "model": found})


def _without_login(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
