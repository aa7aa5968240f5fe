"""Draws follow the reported distribution."""

import pytest
import torch

from rolloutmq.services.inference.sampling import Sampler, Sampling, nucleus

PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.1])
LOGITS = PROBABILITIES.log() + 3.0


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frequencies(sampling: Sampling, rows: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how often each token was drawn, and its reported probability."""
    tokens, logprobs = Sampler([(sampling, rows)], noise()).draw(LOGITS.expand(rows, -1))
    reported = torch.zeros(4).index_put((tokens,), logprobs.exp())
    return torch.bincount(tokens, minlength=4) / rows, reported


def test_draws_follow_the_softmax() -> None:
    drawn, reported = frequencies(Sampling())
    assert torch.allclose(drawn, PROBABILITIES, atol=0.015)
    assert torch.allclose(reported, PROBABILITIES, atol=1e-5)


def test_temperature_sharpens() -> None:
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    drawn, reported = frequencies(Sampling(temperature=0.5))
    assert torch.allclose(drawn, sharp, atol=0.015)
    assert torch.allclose(reported, sharp, atol=1e-5)


def test_nucleus_cuts_and_normalises() -> None:
    drawn, reported = frequencies(Sampling(top_p=0.7))
    expected = torch.tensor([2 / 3, 1 / 3, 0.0, 0.0])
    assert torch.allclose(drawn, expected, atol=0.015)
    assert torch.allclose(reported, expected, atol=1e-5)


def test_nucleus_keeps_the_fewest_that_reach_it() -> None:
    logprobs = PROBABILITIES.log().expand(4, -1)
    kept = nucleus(logprobs, torch.tensor([[0.4], [0.51], [0.89], [1.0]])).isfinite()
    assert kept.sum(-1).tolist() == [1, 2, 3, 4]


def test_greedy_takes_the_likeliest_and_tells_its_probability() -> None:
    drawn, reported = frequencies(Sampling(temperature=0.0, top_p=0.1), rows=50)
    assert drawn.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.allclose(reported, torch.tensor([0.5, 0.0, 0.0, 0.0]), atol=1e-5)


def test_rows_have_their_own_temperature() -> None:
    sampler = Sampler([(Sampling(temperature=0.0), 2), (Sampling(temperature=100.0), 1000)], noise())
    tokens, logprobs = sampler.draw(LOGITS.expand(1002, -1))
    assert tokens[:2].tolist() == [0, 0]
    assert torch.allclose(torch.bincount(tokens[2:]) / 1000, torch.full((4,), 0.25), atol=0.05)
    assert torch.allclose(logprobs[2:].exp(), torch.full((1000,), 0.25), atol=0.01)


def test_a_seed_makes_noise_of_its_own() -> None:
    """Whoever shares the batch, and whichever rows of the request are done already."""
    flat = torch.zeros(100, 50)
    alone = Sampler([(Sampling(seed=5), 10)], noise())
    first, second = alone.draw(flat[:10])[0], alone.draw(flat[:10])[0]
    company = Sampler([(Sampling(), 3), (Sampling(seed=5), 10), (Sampling(seed=6), 10)], noise(9))
    assert torch.equal(company.draw(flat[:23])[0][3:13], first)
    company.keep(torch.tensor([0, 4, 7, 20]))
    assert torch.equal(company.draw(flat[:4])[0][1:3], second[[1, 4]])
    other = Sampler([(Sampling(seed=6), 10)], noise())
    assert not torch.equal(other.draw(flat[:10])[0], first)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-30), Sampling(top_p=1e-300)])
def test_extremes_take_the_likeliest(sampling: Sampling) -> None:
    drawn, reported = frequencies(sampling, rows=20)
    assert drawn.tolist() == reported.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_spoilt_logits_are_an_error() -> None:
    logits = torch.stack([LOGITS, torch.full((4,), torch.nan)])
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler([(Sampling(), 2)], noise()).draw(logits)
