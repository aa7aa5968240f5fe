"""A real vLLM with the trainer's own weights: its samples match a forward pass of transformers.

All tests of a family share one vLLM, because a start takes half a minute. `make test-vllm` runs them.
"""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.services.inference.vllm.support.child import child
from tests.services.inference.vllm.support.lent import (
    ASKED_S,
    FAMILIES,
    Engine,
    Lender,
    lent,
    long_prompt,
    missing,
    worst,
)
from tests.services.inference.vllm.support.under_way import under_way

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.share import Level

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

EXACT = 1e-5
"""Nats, in float32: the same sums in another order."""
Pair = tuple[Lender, Engine]


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with lent(tmp_path_factory.mktemp(request.param) / "run", request.param) as made:
        yield made


def version_of(span: dict[str, Any]) -> PolicyVersion:
    return PolicyVersion(span["version"]["incarnation"], span["version"]["step"])


def only_version(choices: list[dict[str, Any]]) -> PolicyVersion:
    spans = [span for choice in choices for span in choice["weight_versions"]]
    assert len({version_of(span) for span in spans}) == 1, spans
    return version_of(spans[0])


def test_logprobs_are_those_of_a_forward_pass_after_every_step(pair: Pair) -> None:
    trainer, engine = pair
    before = None
    for seed in range(3):
        choices = engine.complete(n=8)
        assert only_version(choices) == trainer.version
        assert max(worst(trainer.model, choice) for choice in choices) < EXACT
        if before is not None:  # the step was no trifle: the old weights say something else
            assert max(worst(before, choice) for choice in choices) > 100 * EXACT
        before = trainer.kept()
        trainer.step(seed)


def test_the_interface_for_tokens_gives_the_same_logprobs(pair: Pair) -> None:
    trainer, engine = pair
    (text,) = engine.complete(n=1, temperature=0)
    prompt, first = text["prompt_token_ids"], text["token_ids"][0]
    for sampling in ({"max_tokens": 24}, {"max_tokens": 24, "temperature": 0, "stop_token_ids": [first]}):
        asked = {
            "token_ids": prompt,
            "return_token_ids": True,
            "sampling_params": {"logprobs": 1, **sampling},
        }
        status, answer = engine.ask("POST", "/inference/v1/generate", asked)
        assert status == 200, answer
        (choice,) = answer["choices"]
        told = [token["logprob"] for token in choice["logprobs"]["content"]]
        as_text = {
            **choice,
            "prompt_token_ids": answer["prompt_token_ids"],
            "logprobs": {"token_logprobs": told},
        }
        assert worst(trainer.model, as_text) < EXACT
        assert only_version([choice]) == trainer.version
    assert (choice["token_ids"], choice["stop_reason"]) == ([first], first)


def test_a_long_prompt_is_read_anew_by_new_weights(pair: Pair) -> None:
    """A prompt of 300 tokens fills two blocks of the prefix cache, which the next request would find."""
    trainer, engine = pair
    prompt = long_prompt(7, 300)
    for seed in range(3):
        for cached in (False, True):
            before = engine.cached_tokens()
            choices = engine.complete(prompt=prompt, n=1)
            found = engine.cached_tokens() - before
            assert found >= 256 if cached else found == 0, "two blocks of 128 that this version has read"
            assert only_version(choices) == trainer.version
            assert max(worst(trainer.model, choice) for choice in choices) < EXACT
        trainer.step(10 + seed)


def test_a_sequence_under_way_has_each_token_from_the_version_that_it_says(pair: Pair) -> None:
    trainer, engine = pair
    models = {trainer.version: trainer.kept()}
    found: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: found.extend(engine.complete(prompt=long_prompt(8, 140), n=4, max_tokens=360))
    )
    asking.start()
    seed = 20
    while asking.is_alive():
        version = trainer.step(seed)
        models[version] = trainer.kept()
        seed += 1
        time.sleep(0.05)
    asking.join(ASKED_S)
    assert max(len(choice["weight_versions"]) for choice in found) > 1, "nothing was under way"
    for choice in found:
        at = 0
        for span in choice["weight_versions"]:
            assert span["start"] == at
            at = span["end"]
            assert worst(models[version_of(span)], choice, span["start"], at) < EXACT
        assert at == len(choice["token_ids"])


def test_both_sides_answer_each_other(pair: Pair) -> None:
    """The owner's question is answered by vLLM itself, in the memory that both map."""
    trainer, engine = pair
    asking = threading.Thread(target=lambda: engine.complete(max_tokens=200))
    asking.start()
    try:
        proof = trainer.share.verify(Level.NONCE)
    finally:
        asking.join(ASKED_S)
    assert proof.answered_s is not None


def test_conversations_greedy_answers_and_stops(pair: Pair) -> None:
    trainer, engine = pair
    asked = {
        "messages": [{"role": "user", "content": "12+7="}],
        "logprobs": True,
        "return_token_ids": True,
        "max_tokens": 8,
        "n": 2,
    }
    status, answer = engine.ask("POST", "/v1/chat/completions", asked)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"][0] == 1
        told = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert worst(trainer.model, {**choice, "logprobs": {"token_logprobs": told}}) < EXACT
    first, second = engine.complete(n=2, temperature=0)
    assert first["token_ids"] == second["token_ids"]
    assert worst(trainer.model, first) < EXACT
    stops = engine.complete(n=8, stop=list("0123456789"), max_tokens=200)
    ended = [choice for choice in stops if choice["finish_reason"] == "stop"]
    assert ended
    assert all(worst(trainer.model, choice) < EXACT for choice in ended)
    assert not any(set(choice["text"]) & set("0123456789") for choice in ended)


def test_temperature_is_in_the_logprobs(pair: Pair) -> None:
    trainer, engine = pair
    (choice,) = engine.complete(temperature=0.5)
    assert worst(trainer.model, choice) > 100 * EXACT
    with torch.no_grad():
        tokens = torch.tensor([[*choice["prompt_token_ids"], *choice["token_ids"]]])
        logits = trainer.model(input_ids=tokens, use_cache=False).logits[0] / 0.5
    start = len(choice["prompt_token_ids"])
    own = logits.log_softmax(-1)[start - 1 : -1].gather(-1, tokens[0, start:, None])[:, 0]
    assert float((torch.tensor(choice["logprobs"]["token_logprobs"]) - own).abs().max()) < EXACT


def test_what_cannot_be_served_exactly_is_refused(pair: Pair) -> None:
    _, engine = pair
    assert engine.status(top_k=5) == 400
    assert engine.status(prompt=[98, 99]) == 400, "row 99 is only there to fill up"
    assert engine.status(prompt=[1] * 511, max_tokens=2) == 400
    assert engine.status(model="another") == 404


WRITER = """
import mmap, os, signal, sys
from pathlib import Path
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.lock import WeightLock
address = segment_file.read_address(Path(sys.argv[1]))
segment = segment_file.open_existing(Path(address.path), address.nonce, writable=True)
memory = mmap.mmap(segment.fd, 0)
print("ready", flush=True)
sys.stdin.readline()
with WeightLock(memory, segment.fd).writing(PolicyVersion(0, 999)):
    memory[20000:30000] = b"x" * 10000
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_in_mid_write_is_refused_until_a_restore(pair: Pair) -> None:
    trainer, engine = pair
    kept = trainer.kept()
    with child(WRITER, str(trainer.layout.weights)) as writer:
        assert writer.line() == "ready"  # its start may take longer than the request
        with under_way(engine) as status:
            writer.order()
            assert writer.ended() == -signal.SIGKILL
            assert engine.status() == 503
            answer, health = engine.ask("GET", "/health")
            assert (answer, health["status"]) == (503, "torn")
            assert status() == 503, "what was under way ends, and with nothing"
    log = trainer.layout.log("inference-vllm").read_text()
    assert 1 <= log.count("requests aborted") < 5, (
        "vLLM idles, it does not abort the same requests again and again"
    )

    version = PolicyVersion(1, trainer.version.step)
    with trainer.share.writing(version, restoring=True), torch.no_grad():
        for mine, whole in zip(trainer.model.parameters(), kept.parameters(), strict=True):
            mine.copy_(whole)
    trainer.version = version
    choices = engine.complete(n=2)
    assert only_version(choices) == version
    assert max(worst(trainer.model, choice) for choice in choices) < EXACT
    assert engine.ask("GET", "/health")[0] == 200


ON_GPU = 1e-3
"""Nats in float32, between kernels of a GPU and of the CPU. An estimate: no GPU has run it yet."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_vllm_on_the_trainer_s_gpu_maps_its_weights(tmp_path: Path, family: str) -> None:
    with lent(tmp_path / "run", family, backend="cuda_ipc") as (trainer, engine):
        for seed in range(3):
            choices = engine.complete(n=8)
            assert only_version(choices) == trainer.version
            kept = trainer.kept().cpu()
            assert max(worst(kept, choice) for choice in choices) < ON_GPU
            trainer.step(seed)
