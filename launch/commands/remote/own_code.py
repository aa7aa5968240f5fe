"""What a run of another host may have this host load: only what the user of this host has allowed.

The configuration comes from the wire. It names classes, functions, files of data and variables; none of these is the
other host's to choose freely:

    a file           below the directory of `--code`, which no link may leave
    a module         in that directory, or named by `--allow-module`
    a variable       of `env:NAME` in options: named by `--allow-variable`
    a program        none: an environment with `command` is not joined

Nothing is imported here: a wrong name is refused before any code of it runs.
"""

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from rolloutmq.schemas.config.command import secrets_in
from rolloutmq.schemas.config.environment import DatasetConfig, EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.rewards.builtin import BUILTIN
from rolloutmq.services.worker.verifiers.package import module_name

SLOTS_LIMIT: Final = 4096
"""Most rollouts of one worker at once that another host may ask for."""
SOURCE_LIMIT_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class OwnCode:
    """What the user of this host allows.

    Attributes:
        directory: Directory of the code and data, resolved.
        modules: Names of modules or packages that may be imported from anywhere.
        variables: Names of environment variables that options may refer to.
    """

    directory: Path
    modules: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, directory: Path, modules: Iterable[str] = (), variables: Iterable[str] = ()) -> "OwnCode":
        """Return what a command line allows.

        Raises:
            ConfigError: There is no such directory, a link leads to itself, or a name is no module.
        """
        found = _followed("--code", directory)
        if not found.is_dir():
            raise ConfigError("--code", f"there is no directory {directory}")
        names = frozenset(modules)
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError("--allow-module", f"must be the name of a module (got {name!r})")
        return cls(found, names, frozenset(variables))

    def require(self, name: str, config: EnvironmentConfig) -> None:
        """Require that an environment names nothing else. Raises ConfigError."""
        key = f"environment.{name}"
        if config.command:
            raise ConfigError(
                f"{key}.command", "is a program, which another host does not start; join another"
            )
        if config.concurrency > SLOTS_LIMIT:
            raise ConfigError(
                f"{key}.concurrency",
                f"must be at most {SLOTS_LIMIT} on another host (got {config.concurrency})",
            )
        self._require_variables(f"{key}.options", config.options)
        if config.verifiers:
            self._require_named(f"{key}.verifiers", module_name(config.verifiers))
        else:
            self._require_source(f"{key}.entry", config.entry, "class")
        for rater, section in config.rewards.raters.items():
            self._require_rater(f"{key}.rewards.raters.{rater}", section.rater, section.options)
        if config.dataset.path:
            self._require_data(f"{key}.dataset", config.dataset)

    def _require_rater(self, key: str, rater: str, options: Mapping[str, Any]) -> None:
        self._require_variables(f"{key}.options", options)
        if ":" in rater:
            self._require_source(f"{key}.rater", rater, "function")
        elif rater not in BUILTIN:
            raise ConfigError(
                f"{key}.rater",
                f"is not built in, and another host does not load raters of packages by name (got {rater!r}); write "
                "MODULE:FUNCTION, and allow the module with --allow-module",
            )

    def _require_source(self, key: str, entry: str, what: str) -> None:
        source, _, attribute = entry.partition(":")
        if not source.endswith(".py"):
            self._require_module(key, source)
            return
        path = self._below(key, source)
        if not path.is_file():
            raise ConfigError(key, f"there is no file {source} in {self.directory} (--code)")
        if what == "function" and not _defines(path, attribute):
            # An imported one, such as `system` of `os`, is not what the file offers.
            raise ConfigError(key, f"{source} defines no function `{attribute}` itself")

    def _require_module(self, key: str, module: str) -> None:
        parts = module.split(".")
        if not all(part.isidentifier() for part in parts):
            raise ConfigError(key, f"`{module}` is neither a .py file nor a module")
        if self._is_named(module):
            return
        if self._is_here(key, parts) and _is_free(parts[0]):
            return
        raise ConfigError(
            key,
            f"the module {module} is not in {self.directory} (--code); if you trust it with your account, allow "
            f"it with --allow-module {module}",
        )

    def _require_named(self, key: str, module: str) -> None:
        if not self._is_named(module):
            raise ConfigError(
                key,
                f"the package {module} is not allowed; if you trust it with your account, allow it with "
                f"--allow-module {module}",
            )

    def _is_named(self, module: str) -> bool:
        """Return whether a module, or a package around it, is named."""
        return any(module == name or module.startswith(f"{name}.") for name in self.modules)

    def _is_here(self, key: str, parts: list[str]) -> bool:
        """Return whether a module is in the directory, and each package around it."""
        folder = PurePosixPath(*parts)
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if (self.directory / path).is_file():
                self._below(key, str(path))
                return True
        return False

    def _require_data(self, key: str, config: DatasetConfig) -> None:
        path = self._below(f"{key}.path", config.path)
        if not path.exists():
            raise ConfigError(
                f"{key}.path",
                f"there is no {config.path} in {self.directory} (--code), and another host fetches no data set of a "
                "hub; put a copy there",
            )
        for pattern in config.files:
            self._require_relative(f"{key}.files", pattern)

    def _below(self, key: str, text: str) -> Path:
        """Return the path of a file below the directory. Raises ConfigError if it, or a link in it, leads out."""
        self._require_relative(key, text)
        path = _followed(key, self.directory / text)
        if not path.is_relative_to(self.directory):
            raise ConfigError(key, f"a link leads out of {self.directory} (--code) (got {text!r})")
        return path

    def _require_relative(self, key: str, text: str) -> None:
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or ":" in text or "\0" in text or text.startswith("~"):
            raise ConfigError(
                key, f"must be a path below {self.directory} (--code), without `..` or a URL (got {text!r})"
            )

    def _require_variables(self, key: str, options: Mapping[str, Any]) -> None:
        for name in secrets_in(options):
            if name not in self.variables:
                raise ConfigError(
                    key,
                    f"`env:{name}` would read a variable of this host; allow it with --allow-variable {name}",
                )


def _followed(key: str, path: Path) -> Path:
    """Return a path without its links. Raises ConfigError if one leads to itself."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # RuntimeError until Python 3.12
        raise ConfigError(key, f"a link leads to itself; remove it (got {str(path)!r})") from None


def _is_free(package: str) -> bool:
    """Return whether no installed module has this name: it would be imported in place of that in the directory."""
    return importlib.util.find_spec(package) is None


def _defines(path: Path, name: str) -> bool:
    """Return whether a file has a function of this name at its top level, without running it."""
    try:
        if path.stat().st_size > SOURCE_LIMIT_BYTES:
            return False
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name for one in tree.body
    )
