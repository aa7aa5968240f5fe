"""The guide's table of families and RoPE types: what is tested in a real vLLM, and what is refused with which reason.

`make test-vllm` runs the rows.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.services.inference.vllm.support.lent import (
    FAMILIES,
    OTHERS,
    REFUSED,
    START_S,
    Engine,
    Lender,
    lent,
    long_prompt,
    missing,
    worst,
)

from rolloutmq.services.inference.vllm.known_differences import KEYS, ROPE, remark, rope_types

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "vllm.md"
EXACT = 1e-5
"""Nats, in float32: the same sums in another order."""


def rows() -> dict[str, str]:
    """Return the last cell of each row of the table, by the name in its first."""
    table = re.search(r"<!-- table: vllm families -->\n(.*?)\n<!-- end of table -->", GUIDE.read_text(), re.S)
    assert table is not None
    found = {}
    for line in table[1].splitlines()[2:]:
        first, *_, last = (cell.strip() for cell in line.strip("|").split("|"))
        found[first.strip("`")] = last
    return found


def test_the_table_has_a_row_for_each_test_and_no_other() -> None:
    assert rows().keys() == (FAMILIES | OTHERS).keys()
    for name, last in rows().items():
        assert last.startswith("refused: ") == (name in REFUSED), name


def test_a_type_of_rope_is_found_for_each_kind_of_layer() -> None:
    layered = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear"}}
    assert set(rope_types({"rope_parameters": layered})) == {"default", "linear"}
    assert list(rope_types({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}})) == ["yarn"]
    assert list(rope_types({})) == []
    assert "power of two" in remark({"rope_parameters": layered})
    assert remark({"rope_parameters": {"rope_type": "yarn"}}) == ""


def test_reasons_of_refusals_are_those_of_the_code() -> None:
    assert REFUSED["qwen3_moe"] in f"`qwen3_moe` is not supported with vLLM: {KEYS['num_experts']}"
    assert REFUSED["longrope"] in f"RoPE `longrope` is not supported with vLLM: {ROPE['longrope']}"


def real(test: Any) -> Any:
    return pytest.mark.rival(pytest.mark.skipif(bool(missing()), reason=missing())(test))


@real
@pytest.mark.parametrize("row", [row for row in OTHERS if row not in REFUSED])
def test_a_row_samples_as_a_forward_pass_says(tmp_path: Path, row: str) -> None:
    """The prompt is longer than each sliding window, and than the lengths from which RoPE is scaled."""
    prompt = long_prompt(7, 300)
    with lent(tmp_path / "run", row) as (trainer, engine):
        for seed in range(2):
            choices = engine.complete(prompt=prompt, n=4)
            assert choices[0]["weight_versions"][0]["version"]["step"] == trainer.version.step
            assert max(worst(trainer.model, choice) for choice in choices) < EXACT
            trainer.step(seed)


@real
@pytest.mark.parametrize("row", list(REFUSED))
def test_a_row_is_refused_with_the_reason(tmp_path: Path, row: str) -> None:
    trainer = Lender(tmp_path / "run", row)
    engine = Engine(trainer.layout)
    try:
        assert engine.process.wait(START_S) != 0
        assert REFUSED[row] in (trainer.layout.root / "inference.log").read_text().splitlines()[-1]
    finally:
        engine.end()
        trainer.close()
