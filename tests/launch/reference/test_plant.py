"""The page of all keys of a plant."""

from pathlib import Path

from rolloutmq.launch.reference.plant import page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "plant.md"


def test_the_page_is_that_of_the_models() -> None:
    assert PAGE.read_text() == page(), "`make reference` writes it"


def test_a_key_tells_its_default() -> None:
    assert "- `demand` (required): Sequences per second" in page()
    assert "- `start_s` (`20.0`): Mean time" in page()
    assert "- `life_s` (none): Mean time" in page()
