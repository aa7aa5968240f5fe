"""The policy: a causal language model and its tokenizer, built from `[model]` or loaded from a local directory.

Nothing is fetched: a directory is read with `local_files_only`. What others need to build the same policy (the
configuration, the tokenizer) is left in `model/` of the run directory; the weights themselves are shared elsewhere
(`trainer.weights`). The tokenizer files are written by hand, because those that transformers 5 writes name a class
that no transformers 4 has, and other servers still run on that.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from rolloutmq.schemas.config import ModelConfig
from rolloutmq.schemas.errors import ConfigError

logger = logging.getLogger(__name__)

PAD: Final = "<pad>"
BEGIN: Final = "<bos>"
END: Final = "<eos>"
SPECIAL: Final = (PAD, BEGIN, END)
"""Their ids are 0, 1 and 2; the alphabet follows in its order."""
ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}
CHAT_TEMPLATE: Final = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A model without a notion of turns: the contents follow each other."""
_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
    "generation_config.json",
)

Policy = torch.nn.Module
"""A transformers causal language model: `policy(input_ids=(B, T)).logits` is `(B, T, V)`."""


def build_policy(config: ModelConfig, seed: int) -> Policy:
    """Make the policy in the element type of the shared weights, on the CPU, without dropout.

    The same configuration and seed give the same weights, bit for bit.

    Raises:
        ConfigError: `model.path` holds no model that transformers can load.
    """
    torch.manual_seed(seed)
    policy = _loaded(config) if config.path else _built(config)
    # Dropout would make the ratio to the policy that sampled a matter of chance, so it stays off.
    return policy.eval()


def _built(config: ModelConfig) -> Policy:
    # Made in its type, not converted to it: `to` would round the RoPE table as well, which stays in float32.
    policy: Policy = AutoModelForCausalLM.from_config(_llama(config), dtype=_dtype(config))
    return policy


def _dtype(config: ModelConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _llama(config: ModelConfig) -> Any:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters=ROPE,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(BEGIN),
        eos_token_id=SPECIAL.index(END),
        architectures=["LlamaForCausalLM"],
        dtype=config.dtype,
    )


def _loaded(config: ModelConfig) -> Policy:
    path = Path(config.path)
    if not (path / "config.json").is_file():
        raise ConfigError("model.path", f"{path} is not a directory with a config.json")
    disable_progress_bar()  # it would start a thread, and write to a log that nobody watches it in
    try:
        policy: Policy = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=_dtype(config)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model.path", f"{path}: {error}".splitlines()[0]) from error
    return policy


def policy_vocabulary(policy: Policy) -> int:
    """Return how many token ids the policy knows."""
    return int(policy.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]


def policy_positions(policy: Policy) -> int:
    """Return the longest sequence that the policy takes, in tokens."""
    return int(policy.config.get_text_config().max_position_embeddings)  # type: ignore[union-attr,operator]


def write_identity(policy: Policy, config: ModelConfig, directory: Path) -> None:
    """Leave in `directory` what it takes to build the same policy and to read its tokens.

    The configuration is written last, so that a directory with one is complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if config.path:
        for name in _TOKENIZER_FILES:
            if (Path(config.path) / name).is_file():
                shutil.copyfile(Path(config.path) / name, directory / name)
    else:
        write_tokenizer(config, directory)
    _replace(directory / "config.json", policy.config.to_json_string(use_diff=False))  # type: ignore[union-attr,operator]


def write_tokenizer(config: ModelConfig, directory: Path) -> None:
    """Write a tokenizer with one token for each character of the alphabet."""
    _replace(directory / "tokenizer.json", character_tokenizer(config.alphabet).to_str(pretty=True))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    _replace(directory / "tokenizer_config.json", json.dumps(description, indent=2))


def character_tokenizer(alphabet: str) -> Any:
    """Return a `tokenizers.Tokenizer`: `<bos>`, then one token a character. An unknown character is an error."""
    known = dict.fromkeys((*SPECIAL, *alphabet))
    vocabulary = {token: number for number, token in enumerate(known)}
    # No unknown token: it would let a prompt that the policy cannot read pass for one that it can.
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


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def score_tokens(policy: Policy, tokens: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Ask the policy how likely some tokens were, and how undecided it was about them.

    Right padding needs no attention mask: a causal model looks back only, and padding lies ahead.

    Args:
        policy: The model.
        tokens: `(B, T)` token ids, padded on the right.
        rows: `(N,)` row of each token asked for.
        positions: `(N,)` its position, at least 1.

    Returns:
        `(N,)` log-probabilities and `(N,)` entropies in nats, both float32 and with gradient.
    """
    logits = policy(input_ids=tokens[:, :-1], use_cache=False).logits  # (B, T - 1, V)
    # Only what is learned from becomes probabilities: with prompts and padding it would be several times as much.
    logprobs = logits[rows, positions - 1].float().log_softmax(-1)  # (N, V)
    chosen = logprobs.gather(-1, tokens[rows, positions, None]).squeeze(-1)  # (N,)
    entropy = -(logprobs.exp() * logprobs).sum(-1)  # (N,)
    return chosen, entropy
