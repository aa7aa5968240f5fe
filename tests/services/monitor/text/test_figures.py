"""Figures of learning, as the views show them."""

from rolloutmq.services.monitor.text import figures


def test_a_step_shows_its_loss_and_the_figures_that_tell_of_learning() -> None:
    extra = {"grad_norm": 0.5, "kl": 0.01, "trained_tokens": 900.0, "moments_groups/e": 3.0}
    assert list(figures.of_step(1.25, extra).items()) == [("loss", 1.25), ("kl", 0.01), ("grad_norm", 0.5)]


def test_a_line_begins_with_what_is_not_finite() -> None:
    assert figures.line({"loss": 1.23456, "kl": 1e-5}) == "loss 1.235 · kl 1e-05"
    assert figures.line({"kl": 0.5}, ["loss"]) == "loss not finite · kl 0.5"
