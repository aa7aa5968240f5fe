"""A configuration from the wire gets the paths of this host, or a clear refusal."""

from pathlib import Path

import pytest

from rolloutmq.bus.rundir import OWN_CONFIG, load_run
from rolloutmq.bus.transport.mirror.run_copy import RunCopy
from rolloutmq.bus.transport.mirror.shared_config import shared, told
from rolloutmq.launch.commands.remote.configured import reading, receiving, rolling, training
from rolloutmq.launch.commands.remote.own_code import OwnCode
from rolloutmq.launch.commands.remote.served import Served
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import Connection, RunLayout

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


def test_commands_of_one_directory_have_a_configuration_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine took the address of another one, and a relay ended at what an engine had left there."""
    layout, own = RunLayout(tmp_path / "here"), Connection(addresses=("tcp://head:7760",))
    layout.root.mkdir(mode=0o700)
    data = shared(validate({"weights": {"backend": "stream"}}))
    first, second = (
        Served(host, port, has_tokens=True).accepting(training(None))
        for host, port in (("10.0.0.9", 81), ("10.0.0.9", 82))
    )
    for name, accept in (("inference.a", first), ("inference.b", second), ("relay", receiving)):
        RunCopy(layout, own, name).take_config(accept(data, layout))
    RunCopy(layout, own, "inference.c").take_config(RunConfig())
    layout.own_config("inference.c").write_text("{")
    found = {}
    for name in ("inference.a", "inference.b", "relay"):
        monkeypatch.setenv(OWN_CONFIG, str(layout.own_config(name)))
        inference = load_run(layout.root)[0].inference
        found[name] = inference.host, inference.port
    assert found == {
        "inference.a": ("10.0.0.9", 81),
        "inference.b": ("10.0.0.9", 82),
        "relay": ("127.0.0.1", 0),
    }
    monkeypatch.setenv(OWN_CONFIG, str(tmp_path / "elsewhere" / "config-relay.json"))
    assert load_run(layout.root)[0] == RunConfig(), "that of another directory does not count"
