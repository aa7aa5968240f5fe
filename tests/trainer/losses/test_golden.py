"""The losses against what TRL 1.16 computed of the same tokens; `make test-trl` asks TRL itself."""

import pytest
from tests.trainer.losses.golden.tensors import GOLDEN, Known, read
from tests.trainer.losses.tokens import compute, gradients
from torch.testing import assert_close

from rolloutmq.trainer.losses.ratio import weights

KNOWN = {known.name: known for known in read(GOLDEN)}


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_loss_and_gradient_are_those_of_trl(known: Known) -> None:
    assert_same(known)


def assert_same(known: Known) -> None:
    """RLOO's value differs, which only its gradient is used for: TRL's is that of a ratio, here it is a log."""
    if known.config.name != "rloo":
        assert compute(known.inputs, known.config).loss.item() == pytest.approx(
            known.loss, rel=1e-12, abs=1e-12
        )
    assert_close(gradients(known.inputs, known.config), known.gradient, rtol=1e-12, atol=1e-14)


def test_the_tokens_put_every_loss_to_the_test() -> None:
    for name, known in KNOWN.items():
        clipped = compute(known.inputs, known.config).metrics["clipped"].item()
        expected = known.config.name != "rloo"
        assert (0 < clipped < 1) == expected, name
        if "_" in name and "with" in name:
            found = weights(known.inputs, known.config.correction)
            assert ((found == 0) | (found == known.config.correction.high)).any()
            assert ((found != 0) & (found != known.config.correction.high)).any()


def test_what_trl_has_is_asked_of_it() -> None:
    assert {known.config.name for known in KNOWN.values()} == {
        *("grpo", "dr_grpo", "dapo", "decoupled_ppo", "gspo", "cispo", "rloo")
    }
