"""Tokenizers in a run are read alike by transformers 4 and 5, whichever version wrote them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.trainer.policy.tokenizer import (
    BEGIN,
    CLASS,
    CONFIG,
    END,
    NEW_CLASS,
    PAD,
    TEMPLATE,
    character_tokenizer,
    copy_tokenizer,
    portable,
    write_tokenizer,
)

FOUR = Path(__file__).parents[3] / ".venv-transformers4" / "bin" / "python"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What the class of that family takes for a word, whatever its file says."""
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


def of_bytes() -> Tokenizer:
    """Pairs of bytes, as the models in use have them: a blank belongs to the word behind it, any text has tokens."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[PAD, BEGIN, END, "<a>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the other then there 12 120 and the rest thereof"] * 4, trainer)
    return made


@pytest.fixture(params=["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def of_pairs(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A byte-level one as transformers 5 saves it, of a family's class or of none."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes(),
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=["<a>"],
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    made.save_pretrained(tmp_path / "pairs")
    if request.param != CLASS:
        config = tmp_path / "pairs" / CONFIG
        told = json.loads(config.read_bytes()) | {"tokenizer_class": request.param}
        config.write_text(json.dumps(told))
        model = json.loads((tmp_path / "pairs" / "tokenizer.json").read_bytes())["model"]
        (tmp_path / "pairs" / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = "\n".join(" ".join(pair) for pair in model["merges"])
        (tmp_path / "pairs" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return tmp_path / "pairs"


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
def test_transformers_4_reads_pairs_of_bytes_too(of_pairs: Path, tmp_path: Path) -> None:
    directory = copied(of_pairs, tmp_path / "copy")
    told = subprocess.run(
        [FOUR, "-c", ASK, directory], capture_output=True, text=True, timeout=120, check=True
    )
    expected = answers(of_pairs)
    assert len(expected[1]) > 1
    assert json.loads(told.stdout) == expected == answers(directory)


@pytest.mark.rival
def test_transformers_4_does_not_read_what_5_leaves(of_five: Path) -> None:
    """The control: if it could, nothing would have to be written in another way."""
    told = subprocess.run(
        [FOUR, "-c", ASK, of_five], capture_output=True, text=True, timeout=120, check=False
    )
    assert NEW_CLASS in told.stderr
