"""New messages behind sampled tokens, by chat templates of many kinds and tokenizers that merge."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.tokenizer import TextTokenizer
from rolloutmq.services.worker.completion import TokenIds
from rolloutmq.services.worker.openai.stitching import Stitcher, overlap_of
from rolloutmq.trainer.policy.tokenizer import write_tokenizer

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "</s>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = CHATML.replace("m.content", "m.content | trim")
THINKS = (
    "{% set last = messages | map(attribute='role') | list %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NO_GENERATION_PROMPT = CHATML.partition("{% if add")[0]
ALWAYS_GENERATION_PROMPT = NO_GENERATION_PROMPT + "<|im_start|>assistant{{ '\n' }}"
BOS = "<s>" + CHATML
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
SPACED_END = CHATML.replace("<|im_end|>", "\n<|im_end|>")
OPEN_LAST = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if not loop.last %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}</s>[assistant]{% endif %}"
)
JOINED = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
CORPUS = [
    "user: x\nassistant: y\nuser: 12\n\nassistant: 0123 456.\n\ntool: the answer is 42. \n" * 8,
    "<think>\n\n</think>\n\nx12 y12 x1 y1 0012 1012 112 xa ya xuser yuser is. \n" * 8,
    *["x12", "y12"] * 100,
]
TOOL = [{"role": "tool", "content": "12"}]


def byte_pairs(directory: Path, template: str, *, bos: bool = False) -> TextTokenizer:
    """Return a tokenizer that merges what it can, also across spaces and digits."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))
    return TextTokenizer(directory)


class Local:
    """A tokenizer of this process, for a policy."""

    def __init__(self, text: TextTokenizer) -> None:
        self.text = text
        self.asked = 0

    async def tokenize(self, text: str) -> list[int]:
        return self._tried(lambda: self.text.encode(text, special=False))

    async def detokenize(self, tokens: TokenIds) -> str:
        return self.text.shown(list(tokens))

    async def rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        self.asked += 1
        return self._tried(lambda: self.text.render(messages, [dict(one) for one in tools or ()] or None))

    def _tried(self, call: Any) -> list[int]:
        try:
            found: list[int] = call()
        except ApiError as error:
            raise PolicyRefusedError(error.status, error.message) from None
        return found


async def turn(
    text: TextTokenizer, answer: str, end: str, new: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Sample an answer and return the text up to its end, and that of the new tokens."""
    local = Local(text)
    prompt = await local.rendered([{"role": "user", "content": "12 012"}], None)
    # One token for each character: no tokenizer would split the answer like this.
    sampled = [token for each in answer for token in text.encode(each, special=False)]
    sampled += text.encode(end, special=False)
    following = await Stitcher(local).following([*prompt, *sampled], new)
    return text.shown([*prompt, *sampled]), text.shown(following)


@pytest.mark.parametrize(
    ("template", "end", "following"),
    [
        (CHATML, "<|im_end|>", "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
        (STRIPS, "<|im_end|>", "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
        (THINKS, "<|im_end|>", "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (NO_GENERATION_PROMPT, "<|im_end|>", "\n<|im_start|>tool\n12<|im_end|>\n"),
        (ALWAYS_GENERATION_PROMPT, "<|im_end|>", "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
        (BOS, "<|im_end|>", "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
        (SPACED_END, "<|im_end|>", "\n<|im_start|>tool\n12\n<|im_end|>\n<|im_start|>assistant\n"),
        (PLAIN, "\n", "tool: 12\nassistant: "),
        (OPEN_LAST, "</s>", "[tool]12</s>[assistant]"),
        (JOINED, "</s>", "12"),
    ],
)
async def test_new_messages_follow_the_end_that_was_sampled(
    tmp_path: Path, template: str, end: str, following: str
) -> None:
    text = byte_pairs(tmp_path, template)
    before, new = await turn(text, " the answer is 42. ", end, TOOL)
    assert before.endswith(f" the answer is 42. {end}"), "what was sampled stays as it is"
    assert new == following


@pytest.mark.parametrize(
    ("template", "end", "following"),
    [
        (CHATML, "", "<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "\n", "<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "</s>", "<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
        (SPACED_END, "\n", "<|im_end|>\n<|im_start|>tool\n12\n<|im_end|>\n<|im_start|>assistant\n"),
        (PLAIN, "", "\ntool: 12\nassistant: "),
        (JOINED, "", "12"),
        (JOINED, "1", "12"),
        (JOINED, "12", "12"),
    ],
)
async def test_an_answer_that_was_cut_gets_the_end_of_the_template(
    tmp_path: Path, template: str, end: str, following: str
) -> None:
    assert (await turn(byte_pairs(tmp_path, template), "42", end, TOOL))[1] == following


async def test_the_stitched_conversation_is_that_of_the_template(tmp_path: Path) -> None:
    text = byte_pairs(tmp_path, CHATML)
    said = [{"role": "user", "content": "12 012"}, {"role": "assistant", "content": "42."}, *TOOL]
    before, new = await turn(text, "42.", "<|im_end|>", TOOL)
    assert before + new == text.shown(text.render(said))


async def test_several_messages_follow_and_the_header_is_asked_for_once(tmp_path: Path) -> None:
    local = Local(byte_pairs(tmp_path, CHATML))
    stitcher = Stitcher(local)
    end = local.text.encode("<|im_end|>", special=False)
    more = [*TOOL, {"role": "user", "content": "and 0?"}]
    new = await stitcher.following([5, *end], more)
    assert local.text.shown(new) == (
        "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>user\nand 0?<|im_end|>\n<|im_start|>assistant\n"
    )
    asked = local.asked
    await stitcher.following([5, *end], more)
    assert local.asked == asked + 2


async def test_a_merge_across_the_border_is_cut_by_the_text(tmp_path: Path) -> None:
    text = byte_pairs(tmp_path, JOINED)
    one, two = (text.encode(f"{each}12", special=False) for each in "xy")
    assert {len(one), len(two)} == {1}, "the tokenizer merges the stand-ins with the message"
    before, new = await turn(text, "4", "", TOOL)
    assert before.endswith("4")
    assert new == "12"


async def test_the_template_of_alternating_roles_is_satisfied(tmp_path: Path) -> None:
    _, new = await turn(byte_pairs(tmp_path, STRICT), "42", "<|im_end|>", [{"role": "user", "content": "no"}])
    assert new == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(PolicyRefusedError, match="the chat template failed: roles must alternate"):
        await turn(Local(TextTokenizer(tmp_path)).text, "42", "", [{"role": "assistant", "content": "no"}])


async def test_tools_of_the_template_are_no_part_of_a_turn(tmp_path: Path) -> None:
    local = Local(byte_pairs(tmp_path, WITH_TOOLS))
    tools = [{"type": "function", "function": {"name": "sum"}}]
    assert '"sum"' in local.text.shown(await local.rendered(TOOL, tools))
    end = local.text.encode("<|im_end|>", special=False)
    new = await Stitcher(local).following([5, *end], TOOL, tools)
    assert local.text.shown(new) == "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"


async def test_a_beginning_is_not_repeated(tmp_path: Path) -> None:
    text = byte_pairs(tmp_path, BOS, bos=True)
    before, new = await turn(text, "42", "<|im_end|>", TOOL)
    assert (before.count("<s>"), new.count("<s>")) == (1, 0)


async def test_a_template_that_drops_answers_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(PolicyRefusedError, match="leaves out the last answer of the policy"):
        await turn(byte_pairs(tmp_path, template), "42", "", TOOL)


async def test_a_vocabulary_of_other_characters_is_enough(tmp_path: Path) -> None:
    write_tokenizer(ModelConfig(alphabet="+-uv"), tmp_path)
    local = Local(TextTokenizer(tmp_path))
    stitcher = Stitcher(local)
    assert local.text.shown(await stitcher.following([5, 2], [{"role": "user", "content": "+vu-"}])) == "+vu-"
    with pytest.raises(PolicyRefusedError, match="has no two characters"):
        await Stitcher(local).following([5, 2], [{"role": "user", "content": "+u-"}])


@pytest.mark.parametrize(
    ("tokens", "following", "size"),
    [([1, 2], [2, 3], 1), ([1, 2, 2], [2, 2, 3], 2), ([1], [2], 0), ([], [1], 0), ([1, 2], [1, 2, 3], 2)],
)
def test_an_overlap_is_as_long_as_it_can_be(tokens: list[int], following: list[int], size: int) -> None:
    assert overlap_of(tokens, following) == size
