"""A tool of verifiers 0.4: its calls are trained as they were sampled, and its results are not."""

import json
import sys
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import pytest
from tests.services.worker.verifiers.support import TASKSETS, load, missing_tasksets, policy_of, rolled_out

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(bool(missing_tasksets()), reason=missing_tasksets()),
    pytest.mark.filterwarnings("ignore"),  # those of other software
]

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
CALL = '<tool_call>\n{"name": "adding_add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
ANSWER = "It is 5.<|im_end|>"


def write_model(directory: Path) -> Any:
    """Write a tokenizer of bytes with a chat template; return it."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tokenizer


async def test_calls_are_trained_and_results_are_not(
    server: "FakeServer", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS), prepend=":")  # for the process of the tool
    if which("uv") is None:
        pytest.skip("needs uv beside this Python")
    tokenizer = write_model(tmp_path)
    ids = {text: tokenizer.encode(text).ids for text in (CALL, ANSWER)}
    called = tokenizer.token_to_id("<tool_call>")
    server.root = str(tmp_path)
    server.sampler = lambda prompt: ids[ANSWER if called in prompt else CALL]
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    renderer = {"name": "default", "tool_parser": "qwen3"}
    environment = load("tools4", TASKSETS, options={"agent": agent, "renderer": renderer})
    async with policy_of(server.url) as policy, environment:
        group = await rolled_out(environment, policy, size=2)
    assert list(group.scores) == [1.0, 1.0]
    for tokens, mask in zip(group["tokens"], group["mask"], strict=True):
        sampled, given = (
            tokenizer.decode(tokens[rows].tolist(), skip_special_tokens=False) for rows in (mask, ~mask)
        )
        assert sampled == CALL + ANSWER
        assert "tool\n5" in given
        assert "It is" not in given
    roles = [message["role"] for message in group["messages"][0]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    (call,) = group["messages"][0][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
