from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn

from rolloutmq.schemas.config.losses import DapoConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.trainer.step.optimizer import PolicyOptimizer, entropy_weight, learning_rate

CONFIG = TrainerConfig(steps=100, warmup_steps=10, learning_rate=1e-3, final_lr_fraction=0.05)


class Gate:
    """A lock that notes what the weights were when it was taken and when it was given back."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self.seen: list[float] = []

    @contextmanager
    def writing(self) -> Iterator[None]:
        self.seen.append(self._total())
        yield
        self.seen.append(self._total())

    def _total(self) -> float:
        return sum(float(p.detach().double().sum()) for p in self._policy.parameters())


def policy_of(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    nn.init.normal_(next(made.parameters()), std=0.02)
    return made.to(dtype)


def backward(policy: nn.Module, number: int) -> None:
    parameter = next(policy.parameters())
    generator = torch.Generator().manual_seed(number)
    given = torch.randn(16, 8, generator=generator).to(parameter.dtype)
    policy(given).float().pow(2).mean().backward()


def steps(policy: nn.Module, optimizer: PolicyOptimizer, count: int, rate: float, start: int = 0) -> None:
    for number in range(start, start + count):
        backward(policy, number)
        optimizer.step(rate, Gate(policy).writing())


def test_learning_rate_rises_then_falls_to_its_last_fraction() -> None:
    rates = [learning_rate(CONFIG, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n * 1e-4 for n in range(1, 11)])
    assert rates[-1] == pytest.approx(5e-5)
    falls = [a - b for a, b in pairwise(rates[9:])]
    assert falls == pytest.approx([0.95e-3 / 90] * 90)


def test_learning_rate_without_warm_up_and_beyond_the_end() -> None:
    config = CONFIG.model_copy(update={"warmup_steps": 0})
    assert learning_rate(config, 1) == pytest.approx(1e-3, rel=0.02)
    assert learning_rate(config, 1000) == pytest.approx(5e-5)


def test_entropy_weight_falls_to_zero() -> None:
    config = TrainerConfig(steps=100, loss=DapoConfig(entropy=0.02, entropy_until=0.6))
    assert entropy_weight(config, 1) == 0.02
    assert entropy_weight(config, 31) == pytest.approx(0.01)
    assert entropy_weight(config, 61) == entropy_weight(config, 100) == 0.0
    at_once = config.model_copy(update={"loss": DapoConfig(entropy_until=0.0)})
    assert entropy_weight(at_once, 1) == 0.0


def test_float32_weights_are_optimized_in_place_as_adamw_does() -> None:
    policy, twin = policy_of(torch.float32), policy_of(torch.float32)
    addresses = [p.data_ptr() for p in policy.parameters()]
    optimizer = PolicyOptimizer(policy, CONFIG)
    steps(policy, optimizer, 5, 1e-2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=CONFIG.betas, weight_decay=0.0)
    for number in range(5):
        backward(twin, number)
        nn.utils.clip_grad_norm_(twin.parameters(), CONFIG.clip_norm)
        reference.step()
        reference.zero_grad()
    for ours, theirs in zip(policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert addresses == [p.data_ptr() for p in policy.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_weights_change_only_behind_the_gate(dtype: torch.dtype) -> None:
    policy = policy_of(dtype)
    optimizer, gate = PolicyOptimizer(policy, CONFIG), Gate(policy)
    untouched = gate._total()
    backward(policy, 0)
    norm = optimizer.step(1e-1, gate.writing())
    before, after = gate.seen
    assert before == untouched
    assert after != before
    assert norm > 0
    assert all(p.grad is None for p in policy.parameters())


def test_bfloat16_weights_move_as_far_as_the_rate_says() -> None:
    policy = policy_of(torch.bfloat16)
    shared = next(policy.parameters())
    start = shared.detach().float().clone()
    steps(policy, PolicyOptimizer(policy, CONFIG), 100, 1e-5)
    moved = (shared.detach().float() - start).abs().mean().item()

    naive = policy_of(torch.bfloat16)
    adam = torch.optim.AdamW(naive.parameters(), lr=1e-5, weight_decay=0.0)
    for number in range(100):
        backward(naive, number)
        adam.step()
        adam.zero_grad()
    stalled = (next(naive.parameters()).detach().float() - start).abs().mean().item()
    assert moved > 3 * stalled  # in place most updates round to nothing
    assert moved > 1e-4


def test_gradients_of_many_passes_add_up_in_float32() -> None:
    policy = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = PolicyOptimizer(policy, CONFIG)
    for _ in range(1024):
        (policy.weight * 0.5).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.take_gradients()
    # In bfloat16 the sum stands still at 128, where half of one is less than its last digit.
    assert optimizer.step(1e-3, Gate(policy).writing()) == 512.0


def test_at_the_rates_of_rl_the_movement_arrives_in_bfloat16_where_in_place_it_does_not() -> None:
    """100 steps of 1e-6 in one direction: in place a step is a small part of the last digit of most weights."""

    def moved(dtype: torch.dtype, *, in_place: bool = False) -> tuple[float, float]:
        """Part of the weights that changed, and how far they came on average."""
        policy = policy_of(dtype)
        start = next(policy.parameters()).detach().double()
        ours = None if in_place else PolicyOptimizer(policy, CONFIG)
        adam = torch.optim.AdamW(policy.parameters(), lr=1e-6, betas=CONFIG.betas, weight_decay=0.0)
        for _ in range(100):
            backward(policy, 0)
            if ours:
                ours.step(1e-6, nullcontext())
            else:
                adam.step()
                adam.zero_grad()
        far = (next(policy.parameters()).detach().double() - start).abs()
        return float((far > 0).double().mean()), float(far.mean())

    _, whole = moved(torch.float32)
    assert whole == pytest.approx(1e-4, rel=0.1)
    changed, arrived = moved(torch.bfloat16)
    assert changed > 0.8
    assert arrived == pytest.approx(whole, rel=0.15)
    stalled, lost = moved(torch.bfloat16, in_place=True)
    assert stalled < 0.1
    assert lost < 0.1 * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_no_number_changes_nothing(dtype: torch.dtype) -> None:
    policy = policy_of(dtype)
    optimizer, gate = PolicyOptimizer(policy, CONFIG), Gate(policy)
    before = [p.detach().clone() for p in policy.parameters()]
    backward(policy, 0)
    next(policy.parameters()).grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]
    assert optimizer.step(1e-2, gate.writing()) != 0
    assert not gate.seen
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(p.grad is None for p in policy.parameters())
    steps(policy, optimizer, 1, 1e-2)
    assert all(torch.isfinite(p).all() for p in policy.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_exactly(dtype: torch.dtype) -> None:
    policy = policy_of(dtype)
    optimizer = PolicyOptimizer(policy, CONFIG)
    steps(policy, optimizer, 3, 1e-3)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    steps(policy, optimizer, 3, 1e-3, start=3)

    again = policy_of(dtype, seed=9)
    again.load_state_dict(weights)
    restored = PolicyOptimizer(again, CONFIG)
    restored.restore(state)
    steps(again, restored, 3, 1e-3, start=3)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


def test_a_state_of_another_policy_is_refused() -> None:
    optimizer = PolicyOptimizer(policy_of(torch.bfloat16), CONFIG)
    with pytest.raises(KeyError):
        optimizer.restore({})
