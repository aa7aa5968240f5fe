"""vLLM's arguments make its log-probabilities equal those that a trainer recomputes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.schemas.config.inference import KEPT, InferenceConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.inference.vllm import command
from rolloutmq.services.inference.vllm.installed import require_vllm


def arguments(model: Path, **settings: Any) -> tuple[str, ...]:
    config = InferenceConfig.model_validate({"kind": "vllm", "max_batch": 8, "vllm": settings})
    return command.arguments(config, model, Path("/run/http"), 42, 7)


def after(told: tuple[str, ...], option: str) -> str:
    return told[told.index(option) + 1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", "max_position_embeddings": 99}))
    return tmp_path


def test_what_the_numbers_depend_on(model: Path) -> None:
    told = arguments(model, python="/env/bin/python", kv_cache_bytes=1000)
    assert told[:3] == ("/env/bin/python", str(command.START), "42")
    assert after(told, "--dtype") == "float32"
    assert after(told, "--logprobs-mode") == "processed_logprobs"
    assert after(told, "--generation-config") == "vllm"
    assert after(told, "--max-model-len") == "99"
    assert after(told, "--kv-cache-memory-bytes") == "1000"
    assert after(told, "--seed") == "7"
    assert after(told, "--load-format") == "dummy"


def test_what_is_configured_comes_last(model: Path) -> None:
    told = arguments(model, arguments=["--block-size", "32"])
    assert told[-2:] == ("--block-size", "32")


def test_sizes_of_a_model_of_several_parts(model: Path) -> None:
    inner = {"torch_dtype": "bfloat16", "max_position_embeddings": 55}
    (model / "config.json").write_text(json.dumps({"text_config": inner}))
    told = arguments(model)
    assert (after(told, "--dtype"), after(told, "--max-model-len")) == ("bfloat16", "55")


def test_a_model_must_say_its_type(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 99}))
    with pytest.raises(ConfigError, match="dtype"):
        arguments(model)


ALLOWED = {
    "size": (
        "--block-size",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--max-model-len",
        "--max-logprobs",
    ),
    "kernels": ("--attention-backend", "--linear-backend", "-ac", "--attention-config"),
    "dialect": ("--tokenizer-mode", "--chat-template", "--tool-call-parser", "--enable-auto-tool-choice"),
    "cache": ("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill"),
    "seen": ("--enable-log-requests", "--disable-log-stats", "--kv-cache-metrics", "--max-log-len"),
}
"""What a user may set, by what it is about."""


def refusal(*told: str) -> str:
    """Say why these arguments are refused, or nothing."""
    try:
        InferenceConfig.model_validate({"kind": "vllm", "vllm": {"arguments": told}})
    except ValueError as error:
        return str(error)
    return ""


def spellings(name: str) -> list[tuple[str, ...]]:
    """Every way in which vLLM understands one argument."""
    found: list[tuple[str, ...]] = [(name, "3"), (f"{name}=3",), (f"{name}.field", "3"), (f"{name}.field=3",)]
    if name.startswith("--"):
        found += [(f"--{name[2:].replace('-', '_')}", "3"), (f"--{name[2:].replace('-', '_')}=3",)]
    else:
        found += [(f"{name}3",), (f"{name}=3",)]
    return found


def test_what_sharing_rests_on_is_not_to_be_set() -> None:
    for told in (told for name in KEPT for told in spellings(name)):
        assert f"{told[0]} must not be set here: " in refusal(*told), told


@pytest.mark.parametrize(
    "told",
    [
        *(("--kv-cache-dtype=fp8",), ("--kv_cache_dtype", "fp8"), ("--logits-processors", "my.module:One")),
        *(("--speculative-config", '{"method": "ngram"}'), ("--spec-tokens", "4"), ("-sc.method", "ngram")),
        *(("-O3",), ("-O", "3"), ("-O=3",), ("-Odecode",), ("--optimization-level=3",), ("-cc.mode=3",)),
        *(("--compilation-config", "3"), ("--compilation_config.mode=3",), ("--enable-sleep-mode",)),
        *(("--rope-theta", "5e5"), ("--rope_scaling={}",), ("--kv-transfer-config", "{}")),
        *(
            ("--cpu-offload-gb=1",),
            ("--hf-overrides", "{}"),
            ("--hf-overrides.rope_theta", "1"),
            ("-q", "fp8"),
        ),
        *(("--quantization=fp8",), ("--generation-config", "auto"), ("--override_generation_config={}",)),
        # Beginnings of names, which argparse completes.
        *(
            ("--distributed-exec", "mp"),
            ("--specu", "{}"),
            ("--kv-cache-d=fp8",),
            ("--rope-th", "1"),
            ("-t", "2"),
        ),
    ],
)
def test_what_changes_numbers_versions_or_the_mapping_is_refused(told: tuple[str, ...]) -> None:
    assert f"{told[0]} must not be set here: " in refusal(*told)
    assert f"{told[0]} must not be set here: " in refusal("--block-size", "32", *told)


def test_what_changes_none_of_them_may_be_set() -> None:
    for name in (name for names in ALLOWED.values() for name in names):
        for told in ((name, "32"), (f"{name}=32",), (name, "-1")):
            assert refusal(*told) == ""


def test_what_it_listens_on_beside_its_socket_is_this_machine_s_alone(tmp_path: Path) -> None:
    assert command.variables(InferenceConfig(), tmp_path)["VLLM_HOST_IP"] == "127.0.0.1"


def test_it_finds_this_package_and_nothing_else(tmp_path: Path) -> None:
    config = InferenceConfig.model_validate({"kind": "vllm", "vllm": {"threads": 3}})
    told = command.variables(config, tmp_path)
    assert (told["PYTHONPATH"], told["OMP_NUM_THREADS"]) == (str(tmp_path), "3")


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    with pytest.raises(ConfigError, match=r"does not exist; create it with `make \.venv-vllm/\.installed`"):
        require_vllm(python)
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="has no vLLM; install one"):
        require_vllm(python)
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    require_vllm(python)


def test_it_is_the_one_engine_of_its_run() -> None:
    with pytest.raises(ValueError, match=r"max_engines must be 1 with kind `vllm` \(got 2\)"):
        InferenceConfig.model_validate({"kind": "vllm", "max_engines": 2})
