"""Tokenizer of the policy, written so that transformers 4 and 5 both read it.

transformers 5 names a class in `tokenizer_config.json` that transformers 4 lacks, and keeps the chat template in a
separate file; servers and evaluations still run on version 4. Both read what runs and checkpoints contain.
"""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from rolloutmq.bus.files import copy_private, write_private
from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint, fingerprint

PAD: Final = "<pad>"
BEGIN: Final = "<bos>"
END: Final = "<eos>"
SPECIAL: Final = (PAD, BEGIN, END)
"""Special tokens with ids 0, 1 and 2; the alphabet follows in its order."""
CHAT_TEMPLATE: Final = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Template of a model without turns: the contents are concatenated."""
CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
CLASS: Final = "PreTrainedTokenizerFast"
"""Class name that every version accepts for a tokenizer in `tokenizer.json`."""
NEW_CLASS: Final = "TokenizersBackend"
"""Class name that version 5 writes."""
NEW_KEYS: Final = ("backend", "is_local", "local_files_only")
"""Keys that only version 5 writes and no version needs."""
FILES: Final = (
    *("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", TEMPLATE),
)
"""Possible files of a tokenizer, in addition to its configuration."""


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy a tokenizer written by any version of transformers."""
    for name in FILES:
        if (source / name).is_file():
            copy_private(source / name, directory / name)
    if (source / CONFIG).is_file():
        template = source / TEMPLATE
        settings = json.loads((source / CONFIG).read_bytes())
        text = template.read_text(encoding="utf-8") if template.is_file() else None
        replace(directory / CONFIG, json.dumps(portable(settings, text), indent=2, ensure_ascii=False))


def portable(settings: dict[str, Any], template: str | None) -> dict[str, Any]:
    """Return a tokenizer configuration that versions 4 and 5 read alike; `template` is the separate chat template."""
    plain = {key: value for key, value in settings.items() if key not in NEW_KEYS}
    if plain.get("tokenizer_class") == NEW_CLASS:
        plain["tokenizer_class"] = CLASS
    if isinstance(plain.get("extra_special_tokens"), list):
        plain["additional_special_tokens"] = plain.pop("extra_special_tokens")
    if template is not None:
        plain.setdefault("chat_template", template)
    return plain


def write_tokenizer(config: ModelConfig, directory: Path) -> None:
    """Write a tokenizer with one token per character of the alphabet."""
    replace(directory / "tokenizer.json", character_tokenizer(config.alphabet).to_str(pretty=True))
    description = {
        "tokenizer_class": CLASS,
        "pad_token": PAD,
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    replace(directory / CONFIG, json.dumps(description, indent=2))


def configured_fingerprint(config: ModelConfig) -> str:
    """Return the fingerprint of the configured policy's tokenizer; empty if it has none."""
    if config.path:
        return directory_fingerprint(Path(config.tokenizer or config.path))
    return fingerprint(character_tokenizer(config.alphabet))


def character_tokenizer(alphabet: str) -> Any:
    """Return a `tokenizers.Tokenizer`: `<bos>`, then one token per character. Unknown characters are an error."""
    known = dict.fromkeys((*SPECIAL, *alphabet))
    vocabulary = {token: number for number, token in enumerate(known)}
    # No unknown token: it would hide characters that the policy cannot read.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B",
        special_tokens=[(BEGIN, vocabulary[BEGIN])],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def replace(path: Path, text: str) -> None:
    """Write a file of a run atomically."""
    partial = path.with_name(f".{path.name}.partial")
    write_private(partial, text.encode())
    partial.replace(path)
