"""Models of a hub: `model.path` and `teacher.path` may name one, as `organization/name`, in place of a directory.

huggingface_hub downloads and caches it, by its own variables: HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN. The
launcher looks the revision up once, and writes the directory of that commit into `config.json`: every process of the
run reads the same files, and none but the launcher knows the hub. `models.json` keeps the commit for a resumed run.

The checks fetch the description of a model, a few small files; a run fetches the weights once the checks have passed.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.tokenizer_fingerprint import MODEL_FILE
from rolloutmq.launch.endings import raise_all
from rolloutmq.schemas.config.distillation import TeacherConfig
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError, RolloutMQError, install_remedy
from rolloutmq.schemas.files import HubModel, RunLayout

Tell = Callable[[str], None]

NAMED: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""A model of a hub, unless it is a directory here."""
MAIN: Final = "main"
DESCRIPTION: Final = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configuration, tokenizer and chat template."""
WEIGHTS: Final = ("*.safetensors",)
LEFT_OUT: Final = ("*/*", "consolidated*")
"""The same weights in other formats."""
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


def described(
    config: RunConfig, known: Sequence[HubModel] = (), *, tell: Tell = lambda _text: None
) -> tuple[RunConfig, tuple[HubModel, ...]]:
    """Replace each model of a hub by the directory of one of its commits, with configuration and tokenizer.

    Args:
        config: The configuration.
        known: Models that the run has used before: it keeps their commits.
        tell: Told what is fetched, in one line.

    Returns:
        The configuration with directories, and the models of the hub.

    Raises:
        ConfigError: A model, its revision or the hub cannot be reached, or the run has used another one before; of
            several errors, all.
        MissingError: huggingface_hub is not installed.
    """
    models: list[HubModel] = []
    problems: list[RolloutMQError] = []
    for key in ("model", "teacher"):
        section: ModelConfig | TeacherConfig = getattr(config, key)
        before = next((one for one in known if one.key == key), None)
        try:
            if (found := _described(key, section, before, tell)) is None:
                continue
            model, directory = found
        except RolloutMQError as error:
            problems.append(error)
            continue
        models.append(model)
        local = section.model_copy(update={"path": str(directory), "revision": ""})
        config = config.model_copy(update={key: local})
    raise_all(problems)
    return config, tuple(models)


def fetch(config: RunConfig, models: Sequence[HubModel], *, tell: Tell = lambda _text: None) -> None:
    """Fetch the weights of described models into the cache. Blocks for as long as the download takes.

    Raises:
        ConfigError: A download failed, or the model has no weights in the format safetensors.
    """
    for model in models:
        if model.key == "teacher" and config.teacher.vllm_url:  # the vLLM has its own
            continue
        tell(f"fetching {model.name} at {model.commit[:12]}, unless it is in the cache")
        _require_weights(model, _snapshot(model, (*DESCRIPTION, *WEIGHTS)))


def fetched(
    config: RunConfig, known: Sequence[HubModel] = (), *, tell: Tell = lambda _text: None
) -> RunConfig:
    """Return a configuration whose models are directories with weights.

    Raises:
        ConfigError, MissingError: As for `described` and `fetch`.
    """
    config, models = described(config, known, tell=tell)
    fetch(config, models, tell=tell)
    return config


def models_of(layout: RunLayout) -> list[HubModel]:
    """Return the models of a hub that a run has used.

    Raises:
        ConfigError: The record is damaged.
    """
    try:
        return read_json(layout.models, list[HubModel]) or []
    except msgspec.DecodeError as error:
        raise ConfigError(
            str(layout.models),
            f"is damaged: {error}; delete it to continue with the revision of the configuration",
        ) from None


def _described(
    key: str, section: ModelConfig | TeacherConfig, before: HubModel | None, tell: Tell
) -> tuple[HubModel, Path] | None:
    """Fetch the description of a model; None if it is in a directory."""
    name, revision = section.path, section.revision
    if Path(name).exists() or not NAMED.fullmatch(name):
        if revision:
            raise ConfigError(
                f"{key}.revision", f"is only for a model of a hub (got {revision!r} with {name}); remove it"
            )
        return None
    _require_library()
    _require_same(key, name, revision, before)
    if before is None and (hub := _online()):
        tell(f"looking up {name} at {hub}")
    asked = before or HubModel(key=key, name=name, revision=revision, commit="")
    directory = _snapshot(asked, DESCRIPTION)
    if not (directory / MODEL_FILE).is_file():
        raise ConfigError(f"{key}.path", f"{name} has no {MODEL_FILE}; name a model for transformers")
    return HubModel(key=key, name=name, revision=revision, commit=directory.name), directory


def _require_same(key: str, name: str, revision: str, before: HubModel | None) -> None:
    """Refuse to resume a run with another model than it started with."""
    if before is None:
        return
    if name != before.name:
        raise ConfigError(
            f"{key}.path",
            f"the run started with {before.name} (got {name}); start a new run without --resume",
        )
    if revision not in {before.revision, before.commit}:
        raise ConfigError(
            f"{key}.revision",
            f"the run started with {before.revision or MAIN!r}, commit {before.commit} (got {revision or MAIN!r}); "
            "start a new run without --resume",
        )


def _require_library() -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingError("the package huggingface_hub", install_remedy("trainer"))


def _require_weights(model: HubModel, directory: Path) -> None:
    """Require each file of the weights."""
    needed = {SINGLE}
    if (index := directory / INDEX).is_file():
        try:
            needed = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{model.key}.path", f"{model.name}: {INDEX} is damaged: {error!r}") from None
    if missing := sorted(name for name in needed if not (directory / name).is_file()):
        raise ConfigError(
            f"{model.key}.path",
            f"{model.name} has no {missing[0]}; name a model with weights in the format safetensors",
        )


def _snapshot(model: HubModel, patterns: Sequence[str]) -> Path:
    """Fetch files of one commit, and return its directory in the cache."""
    from huggingface_hub import (
        close_session,
        snapshot_download,
    )  # takes a moment, and only a model of a hub needs it

    _show_progress_on_a_terminal()
    try:
        return Path(
            snapshot_download(
                model.name,
                revision=model.commit or model.revision or MAIN,
                allow_patterns=list(patterns),
                ignore_patterns=list(LEFT_OUT),
            )
        )
    except Exception as error:  # its HTTP client has changed with its versions, and so have the errors
        raise _explained(model, error) from error
    finally:
        close_session()  # a launcher lives for hours, and its connections would, too


def _show_progress_on_a_terminal() -> None:
    """Keep the library's progress bars out of logs, and its thread that redraws them out of the launcher."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

    tqdm.monitor_interval = 0
    if not sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()


def _online() -> str:
    """Return the address of the hub; empty if the library may not ask it."""
    from huggingface_hub import constants

    return "" if constants.HF_HUB_OFFLINE else _endpoint()


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _explained(model: HubModel, error: Exception) -> ConfigError:
    """Say in one line why a model cannot be fetched, and what to do."""
    from huggingface_hub import constants, errors

    name, hub, path = model.name, _endpoint(), f"{model.key}.path"
    cause: Any = error
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        cause = error.__cause__  # it was looked for in the cache only because of this
    status = getattr(getattr(cause, "response", None), "status_code", 0)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return ConfigError(
            path,
            f"{name} is no directory here, and not whole in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is "
            "set; unset it, or name a directory",
        )
    if isinstance(cause, errors.GatedRepoError):
        return ConfigError(path, f"{name} is gated; ask for access at {hub}/{name}, and set HF_TOKEN")
    if isinstance(cause, errors.RepositoryNotFoundError):
        return ConfigError(
            path,
            f"{name} is neither a directory here nor a model of {hub}; correct it, or set HF_TOKEN if it is private",
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        asked = model.commit or model.revision or MAIN
        return ConfigError(
            f"{model.key}.revision", f"{name} has no {asked!r}; name a branch, a tag or a commit of it"
        )
    if status in {401, 403}:
        return ConfigError(path, f"{hub} refuses {name} (HTTP {status}); set HF_TOKEN to a token with access")
    why = f"HTTP {status}" if status else _first_line(cause)
    return ConfigError(
        path,
        f"{name} is no directory here, and cannot be fetched from {hub} ({why}); check the network and HF_ENDPOINT and "
        "start again, or name a directory",
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
