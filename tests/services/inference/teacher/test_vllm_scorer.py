"""A simulated vLLM as a teacher: accepted responses, and errors."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray
from tests.trainer.support.saved import save_model
from tokenizers import Tokenizer

from rolloutmq.bus.tokenizer_fingerprint import fingerprint
from rolloutmq.schemas.config.distillation import DistillationConfig, TeacherConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.wire.distillation import TeacherLogprobs
from rolloutmq.services.http_server.listening import listening
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.teacher.scoring import ScoreRequest
from rolloutmq.services.inference.teacher.vllm_scorer import VllmScorer
from rolloutmq.services.inference.vllm.client import EngineFailedError

VOCABULARY = 32


class FakeVllm:
    """Has one distribution for all places: of the tokens `v`, of which 7 is the likeliest, then 8 and so on.

    Attributes:
        status: Of its answers to questions.
        knows: Token ids that it has.
        shift: Added to its log-probabilities.
        prompts: What it was asked about.
        ks: How many entries it was asked for.
    """

    def __init__(self, tokenizer: Path) -> None:
        self.status = 200
        self.knows = VOCABULARY
        self.shift = 0.0
        self.prompts: list[list[int]] = []
        self.ks: list[int] = []
        self.tokenizer: Any = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def logprobs(self) -> NDArray[np.floating[Any]]:
        logits: NDArray[np.floating[Any]] = -0.1 * ((np.arange(self.knows) - 7) % self.knows)
        return logits - float(np.log(np.exp(logits).sum())) + self.shift

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.ks.append(body["prompt_logprobs"])
        self.prompts += body["prompt"]
        if self.status != 200:
            return web.json_response({"error": {"message": "at most 20"}}, status=self.status)
        choices = [
            {"index": number, "text": "", "prompt_logprobs": self.of(prompt, body["prompt_logprobs"])}
            for number, prompt in enumerate(body["prompt"])
        ]
        return web.json_response({"choices": choices[::-1]})

    def of(self, prompt: list[int], k: int) -> list[dict[int, dict[str, Any]] | None]:
        logprobs = self.logprobs()
        best = np.argsort(-logprobs)[:k].tolist()
        return [
            None,
            *({t: {"logprob": logprobs[t], "rank": 1} for t in [token, *best]} for token in prompt[1:]),
        ]

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": "sage", "max_model_len": 40}, {"id": "x", "max_model_len": 1}]}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json())["tokens"]
        return web.json_response({"prompt": self.tokenizer.decode(ids, skip_special_tokens=False)})

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sage"), 0, hidden_size=16, mlp_size=16)


@pytest.fixture
def vllm(directory: Path) -> FakeVllm:
    return FakeVllm(directory)


@pytest.fixture
async def scorer(vllm: FakeVllm, directory: Path) -> AsyncIterator[VllmScorer]:
    app = web.Application()
    app.router.add_post("/v1/completions", vllm.completions)
    app.router.add_post("/detokenize", vllm.detokenize)
    app.router.add_get("/v1/models", vllm.models)
    app.router.add_get("/health", vllm.health)
    async with listening(app, "127.0.0.1", 0, None) as port:
        config = TeacherConfig(path=str(directory), vllm_url=f"http://127.0.0.1:{port}/v1")
        async with VllmScorer.opened(config) as made:
            yield made


def question(teacher_logprobs: TeacherLogprobs, k: int) -> ScoreRequest:
    sequences = [np.array([1, 9, 7, 3]), np.array([4, 4]), np.array([5, 6, 8])]
    return ScoreRequest(
        teacher_logprobs, k, sequences, [np.array([1, 2]), np.array([], np.int64), np.array([2])]
    )


async def test_each_place_gets_what_was_asked_for(vllm: FakeVllm, scorer: VllmScorer) -> None:
    """The token that stands there is told beside the likeliest, which is one too many, or the only one wanted."""
    one = question(TeacherLogprobs.TOP_K, 3)
    await scorer.sample(one)
    assert one.token_ids.tolist() == [[7, 8, 9]] * 3
    assert one.token_ids.dtype == np.int32
    np.testing.assert_allclose(one.logprobs, np.tile(vllm.logprobs()[7:10], (3, 1)), rtol=1e-6)
    # Who is not asked about is not sent, nor is what comes behind the last place.
    assert vllm.prompts == [[1, 9, 7], [5, 6, 8]]
    one = question(TeacherLogprobs.SAMPLED, 1)
    await scorer.sample(one)
    assert one.token_ids.tolist() == [[9], [7], [8]]
    one = question(TeacherLogprobs.FULL, VOCABULARY)
    await scorer.sample(one)
    assert one.token_ids.tolist() == [list(range(VOCABULARY))] * 3
    assert vllm.ks == [3, 0, VOCABULARY]
    one = ScoreRequest(TeacherLogprobs.TOP_K, 3, [np.array([1, 2])], [np.array([], np.int64)])
    await scorer.sample(one)
    assert one.token_ids.shape == one.logprobs.shape == (0, 3)


async def test_what_is_no_answer_is_refused(vllm: FakeVllm, scorer: VllmScorer) -> None:
    async def refused(teacher_logprobs: TeacherLogprobs, k: int, why: str) -> None:
        with pytest.raises(ApiError, match=why) as raised:
            await scorer.sample(question(teacher_logprobs, k))
        assert raised.value.status == 500

    vllm.shift = 3.0
    await refused(TeacherLogprobs.TOP_K, 3, "not log-probabilities")
    vllm.shift, vllm.knows = 0.0, VOCABULARY + 1
    await refused(TeacherLogprobs.FULL, VOCABULARY, "exceeds the 32 token ids")
    vllm.knows = VOCABULARY - 1
    await refused(TeacherLogprobs.FULL, VOCABULARY, "of 31 tokens, 32 were requested")


async def test_refusals_failures_and_absence_are_told_apart(vllm: FakeVllm, scorer: VllmScorer) -> None:
    for status, told in ((400, 400), (422, 400), (500, 500), (501, 500)):
        vllm.status = status
        with pytest.raises(ApiError, match="at most 20") as raised:
            await scorer.sample(question(TeacherLogprobs.TOP_K, 3))
        assert raised.value.status == told
    for status in (429, 503):
        vllm.status = status
        with pytest.raises(EngineFailedError):
            await scorer.sample(question(TeacherLogprobs.TOP_K, 3))
    config = TeacherConfig(path="x", vllm_url="http://127.0.0.1:1")
    async with VllmScorer.opened(config) as nobody:
        with pytest.raises(EngineFailedError, match="vLLM is unavailable"):
            await nobody.sample(question(TeacherLogprobs.TOP_K, 3))


async def test_it_is_proven_before_anything_is_asked(
    vllm: FakeVllm, scorer: VllmScorer, directory: Path, tmp_path: Path
) -> None:
    reach = await scorer.reach(DistillationConfig(kind="top_k", top_k=5))
    assert vllm.ks == [5]
    assert (reach.tokenizer, reach.vocabulary, reach.positions) == (fingerprint(directory), VOCABULARY, 39)
    vllm.status = 400
    with pytest.raises(
        ConfigError, match=r"teacher\.vllm_url: .* cannot be the teacher of this run: .*at most 20"
    ):
        await scorer.reach(DistillationConfig(kind="top_k", top_k=50))
    assert vllm.ks == [5, VOCABULARY]
    other = save_model(tmp_path / "other", 0, hidden_size=16, mlp_size=16, alphabet="9876543210= ")
    vllm.tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    with pytest.raises(ConfigError, match="is not that of"):
        await scorer.reach(DistillationConfig(kind="top_k"))
    async with VllmScorer.opened(TeacherConfig(path="x", vllm_url="10.0.0.7:8000")) as wrong:
        with pytest.raises(ConfigError, match=r"10\.0\.0\.7:8000 is not the address of a vLLM"):
            await wrong.reach(DistillationConfig(kind="top_k"))


def test_its_model_is_named() -> None:
    with pytest.raises(ValueError, match="set it to the directory of the model"):
        TeacherConfig(vllm_url="http://b")
    with pytest.raises(ValueError, match="set it to the directory of the model"):
        TeacherConfig(vllm_url="http://b", url="http://a")
