"""The page of all keys of a configuration."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rolloutmq.launch.reference.configuration import NOT_SAID, page
from rolloutmq.launch.settings import validate

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"
WHOLE = {
    "environment": {
        "mine": {
            "entry": "mine.py:Mine",
            "task_count": 5,
            "rewards": {"raters": {"mine": {"rater": "exact"}}},
        }
    },
    "curriculum": {"mine": {}},
    "trainer": {"lora": {}},
}
"""What is there only if it is asked for."""


def test_the_page_is_that_of_the_models() -> None:
    assert PAGE.read_text() == page(), "`make reference` writes it"


def test_every_key_that_can_be_said_is_on_the_page() -> None:
    sections = re.split(r"^## `\[(.+)\]`$", page(), flags=re.MULTILINE)[1:]
    told = {
        f"{section}.{key}"
        for section, text in zip(sections[::2], sections[1::2], strict=True)
        for key in re.findall(r"^- `(\w+)` \(", text, re.MULTILINE)
    }
    keys = set(_keys(validate(WHOLE).model_dump(exclude=set(NOT_SAID))))
    of_losses = {"trainer.loss.ratio_max"}  # of another loss than the usual one
    assert told == {key.replace(".mine.", ".NAME.") for key in keys} | of_losses


def test_a_key_tells_its_default_and_where_it_depends_on_the_loss() -> None:
    assert "- `high_bytes` (`268435456`, 256 MiB): High-water mark of all environments:" in page()
    assert "- `clip_high` (`0.2`; dapo: `0.28`; gspo: `0.0004`): The probability ratio" in page()
    assert '- `split` (`"train"`): Split of its groups.' in page()
    assert '- `entry` (`""`): Class of the environment' in page()


def _keys(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict) and name not in {"options", "variables", "extra"}:
            yield from _keys(value, f"{path}{name}.")
        else:
            yield path + name
