"""Models and data sets of a hub: a `path` may name one, as `organization/name`, in place of a directory.

huggingface_hub downloads and caches them, by its own variables: HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN. The
launcher looks the revision up once, and writes the directory of that commit into `config.json`: every process of the
run reads the same files, and none but the launcher knows the hub. `hub.json` keeps the commit for a resumed run.

The checks fetch the description of a model, a few small files, and data sets, from which they draw tasks; a run fetches
the weights once the checks have passed.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.tokenizer_fingerprint import MODEL_FILE
from rolloutmq.launch.endings import raise_all
from rolloutmq.launch.preflight.model_files import missing_weights
from rolloutmq.schemas.config.distillation import TeacherConfig
from rolloutmq.schemas.config.environment import DatasetConfig
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError, RolloutMQError, install_remedy
from rolloutmq.schemas.files import HubSource, RunLayout

Tell = Callable[[str], None]
_Section = ModelConfig | TeacherConfig | DatasetConfig

NAMED: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Something of a hub, unless it is a directory here."""
MAIN: Final = "main"
DESCRIPTION: Final = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configuration, tokenizer and chat template."""
WEIGHTS: Final = ("*.safetensors",)
LEFT_OUT: Final = ("*/*", "consolidated*")
"""The same weights in other formats."""
CARD: Final = "README.md"
"""Its header names the files of each split."""
EVERYTHING: Final = ("*",)
WAITS: Final = ("connect", "read", "write", "pool")
"""What a request waits for, as its HTTP client names it."""


@dataclass(frozen=True)
class _Place:
    """A section that may name something of a hub.

    Attributes:
        key: Path of the section.
        section: The section.
        here: The file or directory that goes first.
        env: Environment of a data set; empty for a model.
    """

    key: str
    section: _Section
    here: Path
    env: str = ""

    @property
    def is_away(self) -> bool:
        """Whether it names something that is not on this machine."""
        return bool(NAMED.fullmatch(self.section.path)) and not self.here.exists()

    def moved(self, config: RunConfig, directory: Path) -> RunConfig:
        """Return a configuration with a directory here."""
        section = self.section.model_copy(update={"path": str(directory), "revision": ""})
        if not self.env:
            return config.model_copy(update={self.key: section})
        changed = config.environment[self.env].model_copy(update={"dataset": section})
        return config.model_copy(update={"environment": {**config.environment, self.env: changed}})


def described(
    config: RunConfig,
    known: Sequence[HubSource] = (),
    *,
    keys: Container[str] | None = None,
    tell: Tell = lambda _text: None,
) -> tuple[RunConfig, tuple[HubSource, ...]]:
    """Replace each model and data set of a hub by the directory of one of its commits; a model has no weights there.

    Args:
        config: The configuration.
        known: Models and data sets that the run has used before: it keeps their commits.
        keys: Sections to look at: `model`, `teacher` and those of `dataset_key`; None for all.
        tell: Told what is fetched, in one line.

    Returns:
        The configuration with directories, and what they are of the hub.

    Raises:
        ConfigError: A model or data set, its revision or the hub cannot be reached, or the run has used another one
            before; of several errors, all.
        MissingError: huggingface_hub is not installed.
    """
    sources: list[HubSource] = []
    problems: list[RolloutMQError] = []
    for place in _places(config):
        if keys is not None and place.key not in keys:
            continue
        before = next((one for one in known if one.key == place.key), None)
        try:
            if (found := _described(place, before, tell)) is None:
                continue
        except RolloutMQError as error:
            problems.append(error)
            continue
        sources.append(found[0])
        config = place.moved(config, found[1])
    raise_all(problems)
    return config, tuple(sources)


def dataset_key(env: str) -> str:
    """Return the path of the section that names the data set of an environment."""
    return f"environment.{env}.dataset"


def lacks_dataset(config: RunConfig, env: str) -> bool:
    """Return whether an environment has a data set of a hub that is not described yet: it cannot be loaded."""
    return any(place.env == env and place.is_away for place in _places(config))


def _places(config: RunConfig) -> Iterator[_Place]:
    yield _Place("model", config.model, Path(config.model.path))
    yield _Place("teacher", config.teacher, Path(config.teacher.path))
    for name, environment in config.environment.items():
        dataset = environment.dataset
        yield _Place(dataset_key(name), dataset, config.base_dir / dataset.path, name)


def fetch(config: RunConfig, sources: Sequence[HubSource], *, tell: Tell = lambda _text: None) -> None:
    """Fetch the weights of described models into the cache. Blocks for as long as the download takes.

    Raises:
        ConfigError: A download failed, or the model has no weights in the format safetensors.
    """
    for model in sources:
        if is_dataset(model.key):
            continue
        if model.key == "teacher" and config.teacher.vllm_url:  # the vLLM has its own
            continue
        tell(f"fetching {model.name} at {model.commit[:12]}, unless it is in the cache")
        _require_weights(model, _snapshot(model, (*DESCRIPTION, *WEIGHTS)))


def fetched(
    config: RunConfig, known: Sequence[HubSource] = (), *, tell: Tell = lambda _text: None
) -> RunConfig:
    """Return a configuration whose models are directories with weights.

    Raises:
        ConfigError, MissingError: As for `described` and `fetch`.
    """
    config, sources = described(config, known, tell=tell)
    fetch(config, sources, tell=tell)
    return config


def sources_of(layout: RunLayout) -> list[HubSource]:
    """Return the models and data sets of a hub that a run has used.

    Raises:
        ConfigError: The record is damaged.
    """
    try:
        return read_json(layout.hub, list[HubSource]) or []
    except msgspec.DecodeError as error:
        raise ConfigError(
            str(layout.hub),
            f"is damaged: {error}; delete it to continue with the revision of the configuration",
        ) from None


def _described(place: _Place, before: HubSource | None, tell: Tell) -> tuple[HubSource, Path] | None:
    """Fetch the description of a model, or a data set; None if it is here."""
    key, section = place.key, place.section
    name, revision = section.path, section.revision
    if not place.is_away:
        if revision:
            raise ConfigError(
                f"{key}.revision", f"is only for something of a hub (got {revision!r} with {name}); remove it"
            )
        return None
    _require_library()
    _require_same(key, name, revision, before)
    if before is None and (hub := _online()):
        tell(f"looking up {name} at {hub}")
    asked = before or HubSource(key=key, name=name, revision=revision, commit="")
    if isinstance(section, DatasetConfig):
        directory = _snapshot(asked, (*section.files, CARD) if section.files else EVERYTHING)
    else:
        directory = _snapshot(asked, DESCRIPTION)
    if not (is_dataset(key) or (directory / MODEL_FILE).is_file()):
        raise ConfigError(f"{key}.path", f"{name} has no {MODEL_FILE}; name a model for transformers")
    return HubSource(key=key, name=name, revision=revision, commit=directory.name), directory


def is_dataset(key: str) -> bool:
    """Return whether a section names a data set, and not a model."""
    return key.startswith("environment.")


def _require_same(key: str, name: str, revision: str, before: HubSource | None) -> None:
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


def _require_weights(model: HubSource, directory: Path) -> None:
    """Require each file of the weights."""
    key = f"{model.key}.path"
    if missing := missing_weights(key, directory, model.name):
        raise ConfigError(
            key, f"{model.name} has no {missing}; name a model with weights in the format safetensors"
        )


def _snapshot(model: HubSource, patterns: Sequence[str]) -> Path:
    """Fetch files of one commit, and return its directory in the cache.

    A hub that is silent for HF_HUB_DOWNLOAD_TIMEOUT, by default 10 s, is down: what is whole in the cache is used then.
    """
    from huggingface_hub import (
        close_session,
        get_session,
        snapshot_download,
    )  # takes a moment, and only a model of a hub needs it

    _show_progress_on_a_terminal()
    try:
        get_session().event_hooks["request"].append(_limit)
        return Path(
            snapshot_download(
                model.name,
                revision=model.commit or model.revision or MAIN,
                allow_patterns=list(patterns),
                ignore_patterns=None if is_dataset(model.key) else list(LEFT_OUT),
                repo_type="dataset" if is_dataset(model.key) else "model",
            )
        )
    except Exception as error:  # its HTTP client has changed with its versions, and so have the errors
        raise _explained(model, error) from error
    finally:
        close_session()  # a launcher lives for hours, and its connections would, too


def _limit(request: Any) -> None:
    """Limit the waits of an HTTP request that has no limit, such as the one for the commit of a revision."""
    from huggingface_hub import constants

    given = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        wait: constants.HF_HUB_DOWNLOAD_TIMEOUT if given.get(wait) is None else given[wait] for wait in WAITS
    }


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


def _explained(model: HubSource, error: Exception) -> ConfigError:
    """Say in one line why a model or data set cannot be fetched, and what to do."""
    from huggingface_hub import constants, errors

    name, hub, path = model.name, _endpoint(), f"{model.key}.path"
    kind, page = (
        ("data set", f"{hub}/datasets/{name}") if is_dataset(model.key) else ("model", f"{hub}/{name}")
    )
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
        return ConfigError(path, f"{name} is gated; ask for access at {page}, and set HF_TOKEN")
    if isinstance(cause, errors.RepositoryNotFoundError):
        return ConfigError(
            path,
            f"{name} is neither a directory here nor a {kind} of {hub}; correct it, or set HF_TOKEN if it is private",
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
