"""A configuration from the wire gets the paths of this host, or a clear refusal."""

from pathlib import Path

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.mirror.shared_config import shared
from rolloutmq.launch.commands.remote.configured import reading, receiving, rolling, told, training
from rolloutmq.launch.commands.remote.own_code import OwnCode
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout

TRAINED = {"trainer": {"learning_rate": 1e-6}, "model": {"path": "/their/model", "tokenizer": "/their/words"}}


def test_paths_are_those_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("class Env: pass\n")
    config = validate(
        {"environment": {"e": {"entry": "env.py:Env"}}, "run": {"http_token_file": "t"}, **TRAINED}
    )
    layout = RunLayout(tmp_path / "here")
    found = rolling(["e"], OwnCode.of(tmp_path))(shared(config), layout)
    assert (found.base_dir, found.run.dir, found.run.http_token_file) == (tmp_path, layout.root, None)
    assert (found.model.path, found.model.tokenizer) == (str(layout.model), "")
    assert reading(shared(config), layout).base_dir == layout.root


def test_an_environment_that_the_run_lacks_is_named(tmp_path: Path) -> None:
    data = shared(validate({"environment": {"e": {"entry": "env.py:Env"}}}))
    with pytest.raises(ConfigError, match=r"environment\.x: the run has no such environment .*\(it has: e\)"):
        rolling(["x"], OwnCode.of(tmp_path))(data, RunLayout(tmp_path))


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"run": 1}', b'{"nothing": {}}', b"[" * 100_000])
def test_another_configuration_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="another version of RolloutMQ"):
        told(data)


def test_a_model_by_path_is_named_on_this_host(tmp_path: Path) -> None:
    data, layout = shared(validate(TRAINED)), RunLayout(tmp_path)
    with pytest.raises(ConfigError, match="--model: is required, because the run has a model by path"):
        training(None)(data, layout)
    with pytest.raises(ConfigError, match="--model: there is no directory"):
        training(tmp_path / "missing")(data, layout)
    assert training(tmp_path)(data, layout).model.path == str(tmp_path)


def test_a_relay_needs_a_run_that_streams_its_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights\.backend: must be stream, .*\(got posix_shm\)"):
        receiving(shared(validate(TRAINED)), RunLayout(tmp_path))


def test_a_relay_keeps_what_an_engine_beside_has_chosen(tmp_path: Path) -> None:
    layout, model = RunLayout(tmp_path), tmp_path / "model"
    model.mkdir()
    data = shared(validate({**TRAINED, "weights": {"backend": "stream"}}))
    assert receiving(data, layout).model.path == str(layout.model)
    chosen = training(model)(data, layout)
    inference = chosen.inference.model_copy(update={"port": 8123})
    write_json(layout.config, chosen.model_copy(update={"inference": inference}))
    found = receiving(data, layout)
    assert (found.inference.port, found.model.path) == (8123, str(model))
