"""Optional packages of the adapters, missing with the name of the extra that has them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from rolloutmq.schemas.errors import MissingError, install_remedy
from rolloutmq.schemas.printable import error_text


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra in the block.

    Raises:
        MissingError: One of them is not installed, or the installed one cannot be used, such as one of another version
            without a module; names it and the extra.
    """
    try:
        yield
    except ImportError as error:
        package, _, _ = (error.name or extra).partition(".")
        if (
            isinstance(error, ModuleNotFoundError) and sys.modules.get(package) is None
        ):  # the package is imported first
            raise MissingError(f"the package {package}", install_remedy(extra)) from None
        raise MissingError(
            f"the installed {_installed(package)}",
            install_remedy(extra),
            f"cannot be used ({error_text(error)})",
        ) from error


def _installed(package: str) -> str:
    """Return the name of a package and its version, if the distribution of that name tells it."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package
