"""Sources of a configuration: a TOML file, then environment variables, then `--set key=value`; the last wins.

`broker.high_bytes` is `[broker] high_bytes = ...` in the file, `ROLLOUTMQ_BROKER__HIGH_BYTES=...` in the environment
and `--set broker.high_bytes=...` on the command line. Values of the last two are TOML; what is not TOML is plain text.
Each problem becomes a `ConfigError` with the dotted path and the allowed values; several are raised as one error.
"""

import codecs
import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rolloutmq.bus.files import PRIVATE_DIRECTORY, require_private
from rolloutmq.bus.rundir import read_run, usable, write_json
from rolloutmq.launch.endings import raise_all
from rolloutmq.schemas.config.base import Text, location_of, problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, RolloutMQError
from rolloutmq.schemas.files import RunLayout

ENV_PREFIX: Final = "ROLLOUTMQ_"
ENV_NESTING: Final = "__"
BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "UTF-8 with one"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""First bytes of files that editors of other systems write, and their encodings."""

_Model = TypeVar("_Model", bound=BaseModel)


def load(file: Path | None, *, environ: Mapping[str, str], assignments: Iterable[str] = ()) -> RunConfig:
    """Resolve a configuration.

    Args:
        file: TOML file, or None for the defaults alone.
        environ: Environment variables; only those of the form `ROLLOUTMQ_SECTION__KEY` are used.
        assignments: Texts `key=value` with dotted keys.

    Raises:
        ConfigError: The file is unreadable, a key is unknown, a value is invalid, or two values contradict each other.
    """
    return validate(_tree(file, environ, assignments))


def load_part(
    file: Path, *, environ: Mapping[str, str], assignments: Iterable[str] = ()
) -> tuple[RunConfig | None, Sequence[RolloutMQError]]:
    """Resolve what is valid of a configuration: without the keys and environments that are wrong.

    Args:
        file: TOML file.
        environ: As for `load`.
        assignments: As for `load`.

    Returns:
        The configuration, None if the rest is not valid either, and every problem.

    Raises:
        ConfigError: The file is unreadable.
    """
    tree = _tree(file, environ, assignments)
    try:
        return RunConfig.model_validate(tree), ()
    except ValidationError as error:
        found = error.errors(include_url=False)
        for one in found:
            _remove(tree, [str(part) for part in one["loc"]])
        part = None
        with suppress(ValidationError):
            part = RunConfig.model_validate(tree)
        return part, [_explained(one, RunConfig) for one in found]


def _remove(tree: dict[str, Any], location: Sequence[str]) -> None:
    """Remove a wrong key; of an environment, its whole section, which may not work without the key."""
    if location[:1] == ["environment"] and len(location) > 1:
        for section in ("environment", "curriculum"):
            if isinstance(named := tree.get(section), dict):
                named.pop(location[1], None)
        return
    for part in location:
        if not isinstance(tree.get(part), dict) or part == location[-1]:
            tree.pop(part, None)
            return
        tree = tree[part]


def _tree(file: Path | None, environ: Mapping[str, str], assignments: Iterable[str]) -> dict[str, Any]:
    """Return the values of all sources, not yet validated."""
    tree = read_toml(file) if file is not None else {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and ENV_NESTING in name:
            path = name.removeprefix(ENV_PREFIX).lower().split(ENV_NESTING)
            _assign(tree, path, _value(text))
    assign(tree, assignments)
    if file is not None:
        tree["base_dir"] = str(file.resolve().parent)
    return tree


def overridden(config: RunConfig, assignments: Iterable[str]) -> RunConfig:
    """Return a resolved configuration with further texts `key=value`.

    Raises:
        ConfigError: As for `load`.
    """
    tree = config.model_dump()
    assign(tree, assignments)
    return validate(tree)


def assign(tree: dict[str, Any], assignments: Iterable[str]) -> None:
    """Put values into nested ones.

    Args:
        tree: Values by key; it is changed.
        assignments: Texts `key=value` with dotted keys.

    Raises:
        ConfigError: A text has another form, or a key lies below a value.
    """
    for assignment in assignments:
        key, value = assigned(assignment)
        _assign(tree, key.split("."), value)


def assigned(assignment: str) -> tuple[str, Any]:
    """Return the dotted key and the value of a text `key=value`; ConfigError if it has another form."""
    key, equals, text = assignment.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(assignment, "must be key=value with a dotted key, such as broker.lease_s=60")
    return key.strip(), _value(text.strip())


def validate(tree: Mapping[str, Any]) -> RunConfig:
    """Validate nested values; ConfigError with every problem."""
    return validated(RunConfig, tree)


def validated(kind: type[_Model], tree: Mapping[str, Any]) -> _Model:
    """Validate nested values as a model of sections; ConfigError with every problem."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = [_explained(one, kind) for one in error.errors(include_url=False)]
    raise_all(problems)
    raise AssertionError  # pydantic names at least one


def read_toml(file: Path) -> dict[str, Any]:
    """Return the values of a TOML file; ConfigError if it is unreadable or invalid."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from None
    for mark, encoding in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            raise ConfigError(
                str(file),
                f"must be UTF-8 without a byte order mark (got {encoding}); save it in this encoding",
            )
    try:
        return tomllib.loads(data.decode())
    except ValueError as error:  # no TOML, no UTF-8, or a number with too many digits
        raise ConfigError(str(file), f"is not valid TOML: {error}") from None


def prepare_service(
    run_dir: Path,
    file: Path | None,
    assignments: Sequence[str],
    located: Callable[[RunConfig], RunConfig] = lambda config: config,
    *,
    defaults: Sequence[str] = (),
) -> None:
    """Configure a run directory for a service that runs without a launcher.

    A file replaces the configuration of a directory, assignments alone change only their keys, and without both it
    stays as it is. In a new directory without a file the trainer is somebody else's: nothing but the broker starts.

    Args:
        run_dir: The directory; created if missing.
        file: TOML file.
        assignments: Texts `key=value` with dotted keys.
        located: Replaces models and data sets of a hub by directories.
        defaults: Texts `key=value` that a new configuration begins with.

    Raises:
        NotPrivateError: The directory belongs to another user, or others may write in it.
        AddressInUseError: A broker lives in the directory; nothing of it was changed.
    """
    layout = RunLayout(run_dir)
    configured = layout.config.exists()
    if configured and file is None and not assignments:
        return
    from rolloutmq.services.broker.journal.read.versions import (
        require_own_records,  # commands that only read a file
    )
    from rolloutmq.services.http_server.run_token import with_own_token

    require_own_records(layout)
    run_dir.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    require_private(run_dir)
    with _without_broker(layout) if configured else nullcontext():
        if configured and file is None:
            config = overridden(read_run(run_dir)[0], assignments)
        else:
            alone = () if file is not None else ("trainer.enabled=false",)
            config = load(file, environ=os.environ, assignments=(*defaults, *alone, *assignments))
        write_json(layout.config, with_own_token(located(config), layout))


@contextmanager
def _without_broker(layout: RunLayout) -> Iterator[None]:
    """Keep brokers out of a run directory during the block; AddressInUseError if one lives there."""
    from rolloutmq.bus.transport.bindings import claim  # commands that only read a file

    with ExitStack() as stack:
        with usable(layout.root):
            stack.enter_context(claim(layout))
        yield


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # also a number with too many digits
        return Text(text)
    return Text(found) if isinstance(found, str) else found


def _assign(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for depth, key in enumerate(path[:-1]):
        branch = tree.setdefault(key, {})
        if not isinstance(branch, dict):
            raise ConfigError(
                ".".join(path[: depth + 1]), f"is a value without keys below it (got {'.'.join(path)})"
            )
        tree = branch
    tree[path[-1]] = value


def _explained(error: ErrorDetails, kind: type[BaseModel]) -> ConfigError:
    parts = location_of(error)
    location = _written(parts, kind)
    path = ".".join(location) or "configuration"
    if error["type"] == "extra_forbidden":
        return ConfigError(path, _unknown(parts, kind))
    if error["type"] == "union_tag_invalid":
        return ConfigError(f"{path}.name", _unknown_kind(parts, kind, error.get("ctx", {})["tag"]))
    problem = problem_of(error)
    if error["type"] == "value_error":
        # A validator of a section begins its text with the field, one of the whole run with the dotted path.
        named, _, rest = problem.partition(" " if location else ": ")
        return ConfigError(".".join([*location, named]), rest)
    return ConfigError(path, problem)


def _unknown(location: list[str], root: type[BaseModel]) -> str:
    section = _section(location[:-1], root)
    allowed = [key for key in section.model_fields if key != "base_dir"]
    return f"unknown key; {_hint(location[-1], allowed)}allowed: {', '.join(sorted(allowed))}"


def _unknown_kind(location: list[str], root: type[BaseModel], name: str) -> str:
    allowed = list(kinds_of(_section(location, root)))
    return f"unknown name (got {name!r}); {_hint(name, allowed)}allowed: {', '.join(allowed)}"


def _hint(given: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1)
    return f"did you mean `{close[0]}`? " if close else ""


def _section(location: Iterable[str], root: type[BaseModel]) -> Any:
    """Return the type at the location of an error."""
    annotation: Any = root
    for part in location:
        if is_section(annotation):
            field = annotation.model_fields.get(part)
            annotation = field.annotation if field else None
        elif kinds_of(annotation):
            annotation = kinds_of(annotation)[part]
        elif get_origin(annotation) is dict:  # a mapping from names to sections: the part is the name
            annotation = get_args(annotation)[1]
        else:
            return None
    return annotation


def _written(location: list[str], root: type[BaseModel]) -> list[str]:
    """Return a location as the configuration spells it.

    Where `name` selects the kind of a section, the location of an error has the kind as an extra part.
    """
    return [part for at, part in enumerate(location) if part not in kinds_of(_section(location[:at], root))]


def kinds_of(annotation: Any) -> dict[str, Any]:
    """Return the kinds of a section by name; empty if it has only one kind or is a value."""
    members = get_args(annotation)
    if not members or not all(map(is_section, members)):
        return {}
    return {member.model_fields["name"].default: member for member in members}


def is_section(annotation: Any) -> bool:
    """Return whether the type of a key is a section."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
