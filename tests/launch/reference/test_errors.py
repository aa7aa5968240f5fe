"""The error reference."""

from pathlib import Path

import rolloutmq
from rolloutmq.launch.reference.errors import page, public_errors

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "errors.md"


def test_the_page_is_that_of_the_classes() -> None:
    assert PAGE.read_text() == page(), "`make reference` writes it"


def test_every_public_error_is_on_the_page() -> None:
    names = {name for name in rolloutmq.__all__ if name.endswith("Error")}
    assert names == {error.__name__ for error in public_errors()}
    assert all(f"`{name}`" in page() for name in names)
