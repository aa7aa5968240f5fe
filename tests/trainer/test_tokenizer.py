"""A tokenizer that is left in a run is read alike by transformers 4 and 5, whichever of them wrote it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rolloutmq.schemas.config import ModelConfig
from rolloutmq.trainer.tokenizer import (
    BEGIN,
    END,
    NEW_CLASS,
    PAD,
    TEMPLATE,
    character_tokenizer,
    copy_tokenizer,
    portable,
    write_tokenizer,
)

FOUR = Path(__file__).parents[2] / ".venv-transformers4" / "bin" / "python"
ASK = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
chat = [{"role": "user", "content": "12"}, {"role": "user", "content": "0"}]
print(json.dumps([
    tokenizer("12<a>").input_ids,
    tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False),
    [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    tokenizer.decode([1, 4, 5, 2], skip_special_tokens=True),
]))
"""


@pytest.fixture
def of_five(tmp_path: Path) -> Path:
    """A tokenizer as transformers 5 leaves it: of its own class, the template in a file."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=character_tokenizer("0123"),
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=["<a>"],
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    made.save_pretrained(tmp_path / "five")
    assert (
        json.loads((tmp_path / "five" / "tokenizer_config.json").read_bytes())["tokenizer_class"] == NEW_CLASS
    )
    assert (tmp_path / "five" / TEMPLATE).is_file()
    return tmp_path / "five"


def answers(directory: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    chat = [{"role": "user", "content": "12"}, {"role": "user", "content": "0"}]
    return [
        tokenizer("12<a>").input_ids,
        tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False),
        [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        tokenizer.decode([1, 4, 5, 2], skip_special_tokens=True),
    ]


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    copy_tokenizer(source, target)
    return target


def test_a_copy_means_what_it_was_copied_from(of_five: Path, tmp_path: Path) -> None:
    assert answers(copied(of_five, tmp_path / "copy")) == answers(of_five)


@pytest.mark.parametrize(
    ("told", "template", "expected"),
    [
        (
            {"tokenizer_class": NEW_CLASS, "backend": "x"},
            None,
            {"tokenizer_class": "PreTrainedTokenizerFast"},
        ),
        (
            {"tokenizer_class": "Qwen2Tokenizer"},
            "t",
            {"tokenizer_class": "Qwen2Tokenizer", "chat_template": "t"},
        ),
        ({"chat_template": "own"}, "t", {"chat_template": "own"}),
        ({"extra_special_tokens": ["<a>"]}, None, {"additional_special_tokens": ["<a>"]}),
        ({"extra_special_tokens": {"image": "<i>"}}, None, {"extra_special_tokens": {"image": "<i>"}}),
    ],
)
def test_what_only_one_version_reads_is_put_as_both_do(
    told: dict[str, Any], template: str | None, expected: dict[str, Any]
) -> None:
    assert portable(told, template) == expected


@pytest.mark.rival
@pytest.mark.parametrize("copy", [False, True])
def test_transformers_4_reads_what_is_left(of_five: Path, tmp_path: Path, copy: bool) -> None:
    if copy:
        directory = copied(of_five, tmp_path / "copy")
    else:
        directory = tmp_path / "written"
        directory.mkdir()
        write_tokenizer(ModelConfig(alphabet="0123<a>"), directory)
    told = subprocess.run(
        [FOUR, "-c", ASK, directory], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(told.stdout) == answers(directory)


@pytest.mark.rival
def test_transformers_4_does_not_read_what_5_leaves(of_five: Path) -> None:
    """The control: if it could, nothing would have to be written in another way."""
    told = subprocess.run(
        [FOUR, "-c", ASK, of_five], capture_output=True, text=True, timeout=120, check=False
    )
    assert NEW_CLASS in told.stderr
