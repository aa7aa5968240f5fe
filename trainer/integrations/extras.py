"""Optional packages of the adapters, missing with the name of the extra that has them."""

from collections.abc import Iterator
from contextlib import contextmanager

from rolloutmq.schemas.errors import MissingError, install_remedy


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra in the block.

    Raises:
        MissingError: One of them is not installed; names it and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package, _, _ = (error.name or extra).partition(".")
        raise MissingError(f"the package {package}", install_remedy(extra)) from None
