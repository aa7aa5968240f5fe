"""Other hosts get what they need of a configuration, and neither secrets nor paths."""

import json
from typing import Any

import pytest

from rolloutmq.bus.transport.mirror.shared_config import shared
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig

FULL: dict[str, Any] = {
    "run": {"name": "r", "dir": "/secret/dir", "http_token_file": "/secret/token", "seed": 7},
    "environment": {
        "e": {"entry": "env.py:Env", "options": {"key": "env:API_KEY"}, "group_size": 4},
        "p": {"command": ["/secret/program"], "variables": {"K": "env:OTHER"}},
    },
    "gateway": {"enabled": True, "listen": True},
    "inference": {"kind": "external", "url": "http://user:secretword@host:8000/v1"},
    "model": {"path": "/secret/model", "tokenizer": "/secret/words", "revision": "main"},
    "trainer": {"learning_rate": 1e-6, "steps": 9, "distillation": {"kind": "sampled"}},
    "teacher": {"url": "http://user:secretword@teacher:1"},
    "telemetry": {"mlflow_uri": "http://user:secretword@mlflow"},
}


def test_neither_secrets_nor_paths_are_told() -> None:
    told = shared(validate(FULL)).decode()
    assert "secret" not in told
    found = json.loads(told)
    assert found["environment"]["e"]["options"] == {"key": "env:API_KEY"}
    assert found["inference"]["url"] == "http://host:8000/v1"
    assert list(found["environment"]) == ["e"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        FULL,
        {"environment": {"e": {"entry": "env.py:Env", "task_count": 10}}, "curriculum": {"e": {}}},
        {"trainer": {"enabled": False}},
        {"trainer": {"batch_tokens": 512}, "inference": {"max_engines": 3}},
        {"environment": {"e": {"entry": "m:E", "split": "eval"}}, "evaluation": {"enabled": True}},
    ],
)
def test_it_is_a_configuration_of_its_own(given: dict[str, Any]) -> None:
    config = validate(given)
    found = RunConfig.model_validate_json(shared(config))
    for name, env in config.environment.items():
        assert env.command or found.environment[name] == env
    assert found.trainer == config.trainer
    assert (found.run.name, found.run.seed) == (config.run.name, config.run.seed)
    assert found.evaluated == config.evaluated
    assert shared(found) == shared(RunConfig.model_validate_json(shared(found)))


def test_whether_weights_may_be_clear_is_told() -> None:
    for insecure in (False, True):
        weights = {"backend": "stream", "listen": "tcp://127.0.0.1:7764", "insecure": insecure}
        found = RunConfig.model_validate_json(shared(validate({"weights": weights})))
        assert (found.weights.insecure, found.weights.listen) == (insecure, RunConfig().weights.listen)
