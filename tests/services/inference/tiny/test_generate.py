"""Generation against a plain forward pass over the whole sequence, and against a loop without a cache."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.errors import WeightsTornError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Continuation, Job, Span
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.tiny.generate import Generator, pad_left, spans_of
from rolloutmq.trainer.policy.model import build_policy

V = PolicyVersion
END = 2


class Still:
    """Weights that do not change, or do so before a given forward pass."""

    def __init__(self, change_at: int = -1, model: Any = None) -> None:
        self.passes = 0
        self.change_at = change_at
        self.model = model

    def keeping(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def reading(self) -> Iterator[PolicyVersion]:
        if self.passes == self.change_at:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.5)
        yield V(0, int(0 <= self.change_at <= self.passes))
        self.passes += 1


class Watched:
    """A policy that remembers the shapes it was asked for."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.config = policy.config
        self.shapes: list[tuple[int, ...]] = []
        self.positions: list[list[list[int]]] = []

    def __call__(self, **arguments: Any) -> Any:
        self.shapes.append(tuple(arguments["input_ids"].shape))
        self.positions.append(arguments["position_ids"].tolist())
        return self.policy(**arguments)


def policy(**changes: Any) -> Any:
    return build_policy(ModelConfig(initializer_range=0.1, **changes), 0)


def text_of(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def run(
    model: Any,
    jobs: Sequence[Job],
    weights: Any = None,
    ends: Sequence[int] = (END,),
    seed: int = 0,
    *,
    fp32_head: bool = False,
) -> list[Job]:
    done: list[Job] = []
    generator = Generator(model, weights or Still(), ends, text_of, seed, fp32_head=fp32_head)
    generator.generate(jobs, done.extend)
    return done


def plain_logprobs(model: Any, prompt: list[int], result: Continuation, temperature: float) -> Tensor:
    """Score the continuation by one forward pass over the whole sequence, unpadded."""
    tokens = torch.tensor([prompt + result.token_ids])
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = torch.tensor(result.token_ids)[:, None]
    scored: Tensor = (logits / temperature).log_softmax(-1).gather(-1, chosen).squeeze(-1)
    return scored


PROMPTS = [[1, 5, 6, 7, 13], [1, 4], [1, 9, 9, 9, 9, 9, 9, 9, 9, 3, 13], [7]]


def test_logprobs_are_those_of_a_plain_forward_pass() -> None:
    model = policy()
    jobs = [
        Job([prompt], Sampling(n=4, max_tokens=12, temperature=t)) for prompt in PROMPTS for t in (1.0, 0.7)
    ]
    assert set(run(model, jobs)) == set(jobs)
    for job in jobs:
        assert len(job.results) == 4
        for result in job.results:
            expected = plain_logprobs(model, job.prompts[0], result, job.sampling.temperature)
            assert torch.allclose(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=0)


def test_bfloat16_agrees_within_its_precision() -> None:
    model = policy(dtype="bfloat16")
    job = Job(PROMPTS[:3], Sampling(n=2, max_tokens=8))
    run(model, [job])
    for index, result in enumerate(job.results):
        expected = plain_logprobs(model, PROMPTS[index // 2], result, 1.0)
        assert torch.allclose(torch.tensor(result.logprobs), expected, atol=0.15, rtol=0)


def test_with_a_float32_head_a_bfloat16_policy_is_sampled_as_in_float64() -> None:
    """Without it each logit is rounded to 8 bits. The first token is looked at: its hidden state is the trainer's."""
    model, prompt = policy(dtype="bfloat16"), PROMPTS[0]
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1].double()
        exact = (hidden @ model.lm_head.weight.double().T).log_softmax(-1)

    def furthest(fp32_head: bool) -> float:
        job = Job([prompt], Sampling(n=16, max_tokens=1))
        run(model, [job], fp32_head=fp32_head)
        tokens, logprobs = zip(*((one.token_ids[0], one.logprobs[0]) for one in job.results), strict=True)
        return float((torch.tensor(logprobs) - exact[list(tokens)]).abs().max())

    assert furthest(True) < 1e-5
    assert furthest(False) > 1e-3


def test_greedy_is_the_naive_loop() -> None:
    model = policy()
    job = Job(PROMPTS, Sampling(max_tokens=20, temperature=0.0))
    run(model, [job], ends=())
    for prompt, result in zip(PROMPTS, job.results, strict=True):
        tokens = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                tokens.append(
                    int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
                )
        assert result.token_ids == tokens[len(prompt) :]
        assert not result.stopped


def test_company_and_padding_change_nothing() -> None:
    model = policy()
    alone = Job([PROMPTS[1]], Sampling(n=3, max_tokens=10, seed=11))
    run(model, [alone], seed=1)
    among = Job([PROMPTS[1]], Sampling(n=3, max_tokens=10, seed=11))
    run(model, [Job([PROMPTS[2]], Sampling(n=2, max_tokens=4)), among, Job([PROMPTS[0]], Sampling())], seed=2)
    assert [r.token_ids for r in among.results] == [r.token_ids for r in alone.results]
    assert len({tuple(r.token_ids) for r in alone.results}) == 3
    for one, other in zip(alone.results, among.results, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_prompt_is_read_once_and_the_done_leave() -> None:
    model = Watched(policy())
    jobs = [Job([[1, 5, 13]], Sampling(n=16, max_tokens=2)), Job([[1, 5], [7]], Sampling(n=4, max_tokens=4))]
    run(model, jobs, ends=())
    assert model.shapes == [(3, 3), (24, 1), (8, 1), (8, 1)]
    assert [len(result.token_ids) for result in jobs[1].results] == [4] * 8


def test_positions_count_tokens_and_not_padding() -> None:
    """RoPE is relative and would not tell, other models would."""
    model = Watched(policy())
    run(model, [Job([[1, 5, 13], [7]], Sampling(max_tokens=3))], ends=())
    assert model.positions == [[[0, 1, 2], [0, 0, 0]], [[3], [1]], [[4], [2]]]


def test_an_end_token_ends_its_sequence_only() -> None:
    model = policy()
    job = Job([PROMPTS[0]], Sampling(n=64, max_tokens=30, temperature=3.0))
    run(model, [job])
    lengths = {len(result.token_ids) for result in job.results}
    assert len(lengths) > 5
    for result in job.results:
        assert END not in result.token_ids[:-1]
        assert result.stopped == (result.token_ids[-1] == END)
        assert result.stopped or len(result.token_ids) == 30
        assert len(result.logprobs) == len(result.token_ids) == result.spans[-1].end


def test_a_stop_text_may_span_tokens() -> None:
    model = policy()
    free = Job([PROMPTS[0]], Sampling(max_tokens=12, temperature=0.0))
    run(model, [free], ends=())
    tokens = free.results[0].token_ids
    stop = text_of(tokens[4:6])
    first = text_of(tokens).index(stop) + 2
    stopped = Job([PROMPTS[0]], Sampling(max_tokens=12, temperature=0.0, stop=("zzz", stop)))
    unstopped = Job([PROMPTS[0]], Sampling(max_tokens=12, temperature=0.0, stop=("zzz",)))
    run(model, [stopped, unstopped], ends=())
    assert stopped.results[0].token_ids == tokens[:first]
    assert stopped.results[0].stopped
    assert unstopped.results[0].token_ids == tokens
    assert not unstopped.results[0].stopped


def test_a_job_is_handed_out_when_it_is_done() -> None:
    order: list[int] = []
    jobs = [Job([[1, 5]], Sampling(n=2, max_tokens=limit)) for limit in (3, 1, 5, 1)]
    weights = Still()

    def on_done(done: list[Job]) -> None:
        order.extend(jobs.index(job) for job in done)
        assert all(len(job.results) == 2 for job in done)
        assert weights.passes == max(job.sampling.max_tokens for job in done)

    Generator(policy(), weights, (), text_of).generate(jobs, on_done)
    assert order == [1, 3, 0, 2]


def test_a_cancelled_job_leaves_at_the_next_step() -> None:
    model = Watched(policy())
    short, cancelled = Job([[1]], Sampling(max_tokens=2)), Job([[1]], Sampling(n=3, max_tokens=50))
    done: list[Job] = []

    def on_done(jobs: list[Job]) -> None:
        done.extend(jobs)
        cancelled.cancelled = True

    Generator(model, Still(), (), text_of).generate([short, cancelled], on_done)
    assert done == [short]
    assert cancelled.results == []
    assert len(model.shapes) == 3


def test_weights_that_change_in_between_are_stamped() -> None:
    model = policy()
    job = Job([PROMPTS[0]], Sampling(n=2, max_tokens=6, temperature=0.0))
    run(model, [job], Still(change_at=4, model=model), ends=())
    assert [result.spans for result in job.results] == [(Span(0, 4, V(0, 0)), Span(4, 6, V(0, 1)))] * 2


def test_torn_weights_end_the_batch() -> None:
    class Torn(Still):
        @contextmanager
        def reading(self) -> Iterator[PolicyVersion]:
            if self.passes == 2:
                raise WeightsTornError(V(0, 1))
            with super().reading() as version:
                yield version

    jobs = [Job([[1, 5]], Sampling(max_tokens=limit)) for limit in (1, 5)]
    done: list[Job] = []
    with pytest.raises(WeightsTornError):
        Generator(policy(), Torn(), (), text_of).generate(jobs, done.extend)
    assert done == jobs[:1]
    assert jobs[1].results == []


def test_padding_is_on_the_left() -> None:
    tokens, mask = pad_left([[4, 5, 6], [7]])
    assert tokens.tolist() == [[4, 5, 6], [0, 0, 7]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_equal_versions_are_joined() -> None:
    one, two = V(0, 1), V(0, 2)
    assert spans_of([one]) == (Span(0, 1, one),)
    assert spans_of([one, one, two, one]) == (Span(0, 2, one), Span(2, 3, two), Span(3, 4, one))
