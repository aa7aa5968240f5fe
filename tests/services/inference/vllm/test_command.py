"""vLLM is called so that its log-probabilities are those that a trainer recomputes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.schemas.config import InferenceConfig
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


@pytest.mark.parametrize(
    "argument",
    [
        *("--distributed-executor-backend", "--distributed_executor_backend=mp", "--distributed-exec"),
        *("--worker-extension-cls", "--load-format=auto", "--logprobs-mode", "--served-model-name"),
        *("--uds", "--hf-overrides.rope_theta", "--config=more.yaml", "-tp", "-tp2", "--async-scheduling"),
    ],
)
def test_what_sharing_rests_on_is_not_to_be_set(argument: str) -> None:
    with pytest.raises(ValueError, match="is not to be set here: "):
        InferenceConfig.model_validate({"kind": "vllm", "vllm": {"arguments": [argument, "x"]}})


@pytest.mark.parametrize(
    "argument", ["--block-size", "--max-num-batched-tokens=512", "-1", "--tokenizer-mode"]
)
def test_what_is_mere_size_may_be_set(argument: str) -> None:
    config = InferenceConfig.model_validate({"kind": "vllm", "vllm": {"arguments": [argument, "32"]}})
    assert config.vllm.arguments == (argument, "32")


def test_what_it_listens_on_beside_its_socket_is_this_machine_s_alone(tmp_path: Path) -> None:
    assert command.variables(InferenceConfig(), tmp_path)["VLLM_HOST_IP"] == "127.0.0.1"


def test_it_finds_this_package_and_nothing_else(tmp_path: Path) -> None:
    config = InferenceConfig.model_validate({"kind": "vllm", "vllm": {"threads": 3}})
    told = command.variables(config, tmp_path)
    assert (told["PYTHONPATH"], told["OMP_NUM_THREADS"]) == (str(tmp_path), "3")


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    with pytest.raises(ConfigError, match=r"is not there; `make \.venv-vllm/\.installed` makes it"):
        require_vllm(python)
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="has no vLLM beside it"):
        require_vllm(python)
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    require_vllm(python)


def test_it_is_the_one_engine_of_its_run() -> None:
    with pytest.raises(ValueError, match="it is the one engine of its run"):
        InferenceConfig.model_validate({"kind": "vllm", "max_engines": 2})
