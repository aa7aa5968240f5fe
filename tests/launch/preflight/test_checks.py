"""What cannot work is said before anything is started."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.services.http_server.authority import pair

from benchmarks.harness.listening import free_listen
from rolloutmq.bus.files import write_private
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.launch.preflight import checks
from rolloutmq.launch.preflight.checks import check
from rolloutmq.launch.preflight.verdicts import Problem, Verdict
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    AddressInUseError,
    ConfigError,
    MissingError,
    NotPrivateError,
    TokenizerMismatchError,
    VocabularyMismatchError,
)
from rolloutmq.schemas.network.address import port_of

ENV = "class Env:\n    async def rollout(self, policy, size, rng): ...\n"


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the trial of the environments to its own tests: it starts a process."""
    untried = [Verdict(env="e", advice=(Problem(path="e", problem="not tried"),))]
    monkeypatch.setattr(checks, "try_environments", lambda _config, _names, **_how: untried)


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    (tmp_path / "env.py").write_text(ENV)
    environment = {"e": {"entry": "env.py:Env"}}
    return validate({"environment": environment, "base_dir": str(tmp_path), **sections})


def advice(tmp_path: Path, **sections: Any) -> list[str]:
    return [str(one) for one in check(config(tmp_path, **sections)).advice]


def test_a_good_configuration_passes_with_the_advice_of_the_trial(tmp_path: Path) -> None:
    assert advice(tmp_path) == ["e: not tried"]


@pytest.mark.parametrize(
    ("environment", "sections", "is_told"),
    [
        ({"group_size": 1}, {}, True),
        ({"group_size": 2}, {}, False),
        ({"group_size": 1, "split": "eval"}, {"evaluation": {"enabled": True}}, False),
        ({"group_size": 1}, {"trainer": {"enabled": False}, "inference": {"kind": "none"}}, False),
        ({"group_size": 1}, {"trainer": {"distillation": {"kind": "top_k"}}}, False),
    ],
)
def test_a_group_of_one_sequence_is_advised_against(
    environment: dict[str, Any], sections: dict[str, Any], is_told: bool, tmp_path: Path
) -> None:
    made = config(tmp_path, **sections)
    section = made.environment["e"].model_copy(update=environment)
    found = checks.examine(made.model_copy(update={"environment": {"e": section}})).advice
    about = [str(one) for one in found if one.path == "environment.e.group_size"]
    assert bool(about) == is_told
    assert all(
        "learns nothing from a group of one sequence (got 1); set it to at least 2" in one for one in about
    )


def test_engines_without_a_trainer_of_the_run_are_told_whose_weights_they_wait_for(tmp_path: Path) -> None:
    def advised(**inference: str) -> list[str]:
        return advice(tmp_path, trainer={"enabled": False}, inference=inference)

    (told, _) = advised(kind="tiny")
    assert told.startswith('inference.kind: "tiny" samples from the weights of a trainer')
    assert "verl's cannot" in told
    for fine in ({"kind": "external", "url": "http://x/v1"}, {"kind": "none"}):
        assert advised(**fine) == ["e: not tried"]


def test_a_drain_shorter_than_a_rollout_is_advised_against_with_the_numbers(tmp_path: Path) -> None:
    short, _ = advice(tmp_path, orchestrator={"drain_deadline_s": 30.0})
    assert short.startswith(
        "orchestrator.drain_deadline_s: 30 s is shorter than environment.e.rollout_timeout_s (600 s), so each drain "
    )
    for quiet in (
        {"drain_deadline_s": 600.0},
        {"drain_deadline_s": 30.0, "enabled": False},
        {"end_deadline_s": 1.0},
    ):
        assert advice(tmp_path, orchestrator=quiet) == ["e: not tried"]


def test_a_normalization_that_cancels_is_refused(tmp_path: Path) -> None:
    def trainer(advantage: str = "grpo", *, enabled: bool = True, **rewards: Any) -> RunConfig:
        sections = {"loss": {"advantage": advantage}, "rewards": rewards, "enabled": enabled}
        return config(tmp_path, trainer=sections)

    with pytest.raises(
        ConfigError, match=r"^trainer\.rewards\.normalize: has no effect .*= \"grpo\".*\(got 'zscore'\); set"
    ):
        check(trainer(normalize="zscore"))
    check(trainer(normalize="zscore", clip=5.0))
    check(trainer("dr_grpo", normalize="minmax"))
    check(trainer(normalize="zscore", enabled=False))
    check(trainer(warmup_groups=1))


def test_an_entry_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.e\.entry: there is no file"):
        check(config(tmp_path, environment={"e": {"entry": "none.py:Env"}}))
    with pytest.raises(ConfigError, match=r"environment\.e\.entry: there is no module no_such_module"):
        check(config(tmp_path, environment={"e": {"entry": "no_such_module.env:Env"}}))
    check(config(tmp_path, environment={"e": {"entry": "env:Env"}}))


def test_a_sampler_that_is_not_there(tmp_path: Path) -> None:
    section = {"environment": {"e": {"entry": "env.py:Env", "task_count": 5}}}
    check(config(tmp_path, **section, curriculum={"e": {}}))
    with pytest.raises(ConfigError, match=r"^curriculum\.e\.sampler: unknown sampler \(got 'best'\)"):
        check(config(tmp_path, **section, curriculum={"e": {"sampler": "best"}}))
    with pytest.raises(
        ConfigError, match=r"^curriculum\.e\.options\.explore: must be `float` <= 1\.0 \(got 3\)"
    ):
        check(config(tmp_path, **section, curriculum={"e": {"options": {"explore": 3}}}))


def test_a_secret_that_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"e": {"entry": "env.py:Env", "options": {"key": "env:ENV_KEY"}}}
    monkeypatch.delenv("ENV_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"environment\.e\.options: `env:ENV_KEY` .* export ENV_KEY"):
        check(config(tmp_path, environment=secret))
    monkeypatch.setenv("ENV_KEY", "s3cret-key")
    check(config(tmp_path, environment=secret))


def test_a_teacher_that_is_not_there(tmp_path: Path) -> None:
    def taught(**teacher: Any) -> RunConfig:
        return config(tmp_path, teacher=teacher, trainer={"distillation": {"kind": "full"}})

    model = tmp_path / "model"
    with pytest.raises(ConfigError, match=r"teacher\.path: .*model is not a directory with a config\.json"):
        check(taught(path=str(model)))
    model.mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model/tokenizer\.json: there is no such file"):
        check(taught(path=str(model)))
    words = tmp_path / "words"
    words.mkdir()
    (words / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    check(taught(path=str(model), tokenizer=str(words)))
    check(taught(url="http://elsewhere"))


def write_model(directory: Path, vocab_size: int, *tokens: str) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    vocab = {token: number for number, token in enumerate(tokens)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (directory / "model.safetensors").touch()
    return str(directory)


def test_a_teacher_that_is_none_for_this_student(tmp_path: Path) -> None:
    teacher = write_model(tmp_path / "teacher", 64, "a", "b")

    def taught(kind: str, **student: Any) -> RunConfig:
        trainer = {"distillation": {"kind": kind}, "learning_rate": 1e-6}
        return config(tmp_path, teacher={"path": teacher}, trainer=trainer, model=student)

    unlike = (
        "teacher: its vocabulary differs from the student's (got 64 token ids, the student has {}); "
        'trainer.distillation.kind = "full"'
    )
    student = write_model(tmp_path / "student", 72, "a", "b")
    with pytest.raises(VocabularyMismatchError, match=re.escape(unlike.format(72))):
        check(taught("full", path=student))
    with pytest.raises(VocabularyMismatchError, match=re.escape(unlike.format(32))):
        check(taught("full"))
    check(taught("full", vocab_size=64))
    check(taught("top_k", path=student))
    check(taught("sampled"))
    other = write_model(tmp_path / "other", 64, "b", "a")
    with pytest.raises(TokenizerMismatchError, match="its tokenizer differs from the student's"):
        check(taught("top_k", path=other))
    check(taught("full", path=other, tokenizer=student))


def test_up_ends_as_with_any_wrong_configuration(tmp_path: Path) -> None:
    teacher = write_model(tmp_path / "teacher", 64, "a")
    (tmp_path / "env.py").write_text(ENV)
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[environment.e]\nentry = "env.py:Env"\n'
        f'[teacher]\npath = "{teacher}"\n[trainer.distillation]\nkind = "full"\n'
    )
    for command in (["up", str(file)], ["doctor", "--config", str(file)]):
        done = subprocess.run(
            [sys.executable, "-m", "rolloutmq.launch.cli", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "(got 64 token ids, the student has 32)" in done.stdout + done.stderr
        assert done.returncode == 2
    assert not (tmp_path / "run").exists()


def test_a_batch_that_groups_never_make(tmp_path: Path) -> None:
    groups = {"e": {"entry": "env.py:Env", "group_size": 16}}
    with pytest.raises(
        ConfigError, match=r"trainer\.batch_sequences: .* whole groups of 16 sequences .got 100."
    ):
        check(config(tmp_path, environment=groups, trainer={"batch_sequences": 100}))
    check(config(tmp_path, environment=groups, trainer={"batch_sequences": 100, "enabled": False}))
    check(config(tmp_path, environment=groups, trainer={"batch_tokens": 1001}))
    groups["small"] = {"entry": "env.py:Env", "group_size": 10}
    check(config(tmp_path, environment=groups, trainer={"batch_sequences": 100}))


def test_addresses_that_cannot_or_may_not_be_bound(tmp_path: Path) -> None:
    check(config(tmp_path, broker={"listen": "tcp://0.0.0.0:0", "insecure": True}))
    with pytest.raises(ConfigError, match=r"broker\.listen: cannot bind 192\.0\.2\.7:9"):
        check(config(tmp_path, broker={"listen": "tcp://192.0.2.7:9", "insecure": True}))
    with pytest.raises(ConfigError, match=r"inference\.host: cannot bind 192\.0\.2\.7:1"):
        check(config(tmp_path, inference={"host": "192.0.2.7", "port": 1, "insecure": True}))


def test_a_listener_whose_keys_are_not_there(tmp_path: Path) -> None:
    broker = {"listen": "tcp://127.0.0.1:0", "keys": "keys"}
    with pytest.raises(MissingError, match=r"keys is missing: make keys with `rolloutmq keys init"):
        check(config(tmp_path, broker=broker))
    keys = KeyDirectory.create(config(tmp_path).base_dir / "keys")
    check(config(tmp_path, broker=broker))
    keys.path.chmod(0o755)
    for wrong in (broker, {"keys": "keys"}):  # HTTP asks for the keys, too
        with pytest.raises(NotPrivateError, match=r"other users may use it"):
            check(config(tmp_path, broker=wrong))


def test_the_runs_own_processes_must_accept_its_certificate(tmp_path: Path) -> None:
    base = config(tmp_path).base_dir
    pair(base / "keys")
    files = {"tls_cert": "keys/tls.pem", "tls_key": "keys/tls.key"}
    trusted = {**files, "tls_ca": "keys/ca.pem"}
    check(config(tmp_path, run=trusted))
    with pytest.raises(
        ConfigError, match=r"^run\.tls_cert: processes of this host reach \[inference\] as 127\.0\.0\.1"
    ):
        check(config(tmp_path, run=files))
    with pytest.raises(ConfigError, match=r"as 127\.8\.8\.8, .*IP address mismatch"):
        check(config(tmp_path, run=trusted, inference={"host": "127.8.8.8"}))
    with pytest.raises(ConfigError, match=r"^run\.tls_cert: and tls_key must be set together"):
        check(config(tmp_path, run={"tls_cert": "keys/tls.pem"}))
    pair(base / "keys", days=-0.02)
    with pytest.raises(
        ConfigError, match=r"^run\.tls_cert: the certificate ended at .*; write a renewed one"
    ):
        check(config(tmp_path, run=trusted))
    (base / "keys" / "tls.key").unlink()
    with pytest.raises(ConfigError, match=r"^run\.tls_key: .* cannot be read"):
        check(config(tmp_path, run=trusted))


def test_tokens_without_encryption_are_told(tmp_path: Path) -> None:
    base = config(tmp_path).base_dir
    pair(base / "keys", "localhost")
    write_private(base / "token", b"0123456789abcdef")
    reached = {"inference": {"host": "0.0.0.0"}}
    found = check(config(tmp_path, run={"http_token_file": "token"}, **reached))
    assert [str(one) for one in found.advice if one.path == "run.tls_cert"] == [
        "run.tls_cert: tokens travel unencrypted to inference (0.0.0.0); set run.tls_cert and run.tls_key "
        "(`rolloutmq keys tls`)"
    ]
    run = {
        "http_token_file": "token",
        "tls_cert": "keys/tls.pem",
        "tls_key": "keys/tls.key",
        "tls_ca": "keys/ca.pem",
    }
    assert not [
        one for one in check(config(tmp_path, run=run, **reached)).advice if one.path == "run.tls_cert"
    ]


def test_ports_of_a_listener_in_use_name_their_owner(tmp_path: Path) -> None:
    listen = free_listen()
    with (
        socket.create_server(("127.0.0.1", port_of(listen) + 3)),
        pytest.raises(AddressInUseError, match=r"\(broker\.listen\) is in use by process"),
    ):
        check(config(tmp_path, broker={"listen": listen, "insecure": True}))
    check(config(tmp_path, broker={"listen": listen, "insecure": True}))


def test_a_port_in_use_names_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(AddressInUseError) as caught:
            check(config(tmp_path, inference={"port": port}))
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)


def test_a_metrics_port_in_use_names_its_key_and_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(AddressInUseError) as caught:
            check(config(tmp_path, telemetry={"metrics_port": port}))
    assert f"address 127.0.0.1:{port} (telemetry.metrics_port) is in use by process {os.getpid()}" in str(
        caught.value
    )
    check(config(tmp_path, telemetry={"metrics_port": port}))
    with pytest.raises(ConfigError, match=r"telemetry\.metrics_host: cannot bind 192\.0\.2\.7:1"):
        check(config(tmp_path, telemetry={"metrics_host": "192.0.2.7", "metrics_port": 1, "insecure": True}))


@pytest.mark.parametrize(
    ("telemetry", "package", "extra"),
    [
        ({"sinks": ["wandb"]}, "wandb", "wandb"),
        ({"sinks": ["tensorboard"]}, "tensorboard", "tensorboard"),
        ({"sinks": ["mlflow"]}, "mlflow", "mlflow"),
        ({"trace_ratio": 0.5}, "opentelemetry", "otel"),
    ],
)
def test_an_export_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, telemetry: dict[str, Any], package: str, extra: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith(package) else found(name)
    )
    with pytest.raises(
        MissingError, match=rf"package {package} is missing: .*pip install 'rolloutmq\[{extra}\]'"
    ):
        check(config(tmp_path, telemetry=telemetry))


def test_adapters_need_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    check(config(tmp_path))
    with pytest.raises(MissingError, match=r"peft is missing: .*pip install 'rolloutmq\[lora\]'"):
        check(config(tmp_path, trainer={"lora": {"rank": 4}}))


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(MissingError, match=r"pip install 'rolloutmq\[trainer\]'"):
        check(config(tmp_path))
    external = {"kind": "external", "url": "http://127.0.0.1:1/v1"}
    check(config(tmp_path, trainer={"enabled": False}, inference=external))
