"""A model of a hub becomes the directory of one commit, and what goes wrong is said in one line by its key."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.launch.preflight.hub_server import Hub, serving
from tests.trainer.support.saved import save_model

from benchmarks.end_to_end import scenario
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.commands.scores import repeat
from rolloutmq.launch.preflight import checks
from rolloutmq.launch.preflight.checks import examine, loaded
from rolloutmq.launch.preflight.hub import described, fetch, fetched, sources_of
from rolloutmq.launch.preflight.try_rollouts import TryOptions, try_rollouts
from rolloutmq.launch.settings import prepare_service, validate
from rolloutmq.schemas.config.environment import DatasetConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import HubSource, RunLayout
from rolloutmq.services.worker import loader

NAME = "org/tiny"
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.toml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 1)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a hub, and let the library in this process and in others use it and a cache of its own."""
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        # The library read its variables when it was first imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def config(name: str = NAME, **section: Any) -> RunConfig:
    return validate({"model": {"path": name, **section}, "trainer": {"learning_rate": 1e-3}})


def refusal(**section: Any) -> str:
    """Return the one line that refuses a model."""
    with pytest.raises(ConfigError) as refused:
        fetched(config(**section))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_name_becomes_the_directory_of_its_commit(hub: Hub, model: Path) -> None:
    commit = hub.push(NAME, model)
    told: list[str] = []
    local, models = described(config(), tell=told.append)
    assert models == (HubSource(key="model", name=NAME, revision="", commit=commit),)
    assert told == [f"looking up {NAME} at {hub.url}"]
    directory = Path(local.model.path)
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }  # the checks of a run need no weights
    fetch(local, models)
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_other_formats_of_the_same_weights_stay_at_the_hub(hub: Hub, model: Path) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    more = ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "onnx/model.json")
    hub.push(NAME, {**files, **dict.fromkeys(more, b"large")})
    directory = Path(fetched(config()).model.path)
    assert {path.name for path in directory.rglob("*")} == set(files)


def test_a_directory_needs_no_hub(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    (model.parent / "org").mkdir()
    (model.parent / NAME).symlink_to(model)
    for path in (str(model), NAME, "/no/such/place"):
        given = config(path)
        assert described(given) == (given, ())
    assert not hub.seen
    assert refusal(path=NAME, revision="v1") == (
        f"model.revision: is only for something of a hub (got 'v1' with {NAME}); remove it"
    )


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, model: Path) -> None:
    first = hub.push(NAME, model, ref="v1")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    second = hub.push(NAME, {**files, "generation_config.json": b"{}"})
    for revision, commit in (("v1", first), (first, first), ("main", second), ("", second)):
        assert Path(fetched(config(revision=revision)).model.path).name == commit


def test_a_missing_model_or_revision_is_refused_by_its_key(hub: Hub, model: Path) -> None:
    hub.push(NAME, model)
    assert refusal(name="org/none") == (
        f"model.path: org/none is neither a directory here nor a model of {hub.url}; "
        "correct it, or set HF_TOKEN if it is private"
    )
    assert refusal(revision="v9") == (
        f"model.revision: {NAME} has no 'v9'; name a branch, a tag or a commit of it"
    )
    hub.push("org/empty", {"README.md": b""})
    assert (
        refusal(name="org/empty") == "model.path: org/empty has no config.json; name a model for transformers"
    )


def test_a_gated_or_private_model_asks_for_a_token(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, model)
    hub.gated[NAME] = 403
    assert refusal() == f"model.path: {NAME} is gated; ask for access at {hub.url}/{NAME}, and set HF_TOKEN"
    hub.gated[NAME] = 401
    assert refusal().endswith("set HF_TOKEN if it is private")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert Path(fetched(config()).model.path).is_dir()


def test_a_hub_that_is_down_is_told_and_the_next_start_succeeds(hub: Hub, model: Path) -> None:
    hub.push(NAME, model)
    hub.failing["api/models"] = 1
    assert refusal() == (
        f"model.path: {NAME} is no directory here, and cannot be fetched from {hub.url} (HTTP 503); "
        "check the network and HF_ENDPOINT and start again, or name a directory"
    )
    hub.failing["resolve"] = 1  # the library itself asks again
    assert Path(fetched(config()).model.path).is_dir()
    assert not hub.failing["resolve"]


def test_a_slow_hub_is_waited_for(hub: Hub, model: Path) -> None:
    hub.push(NAME, model)
    hub.delay_s = 0.3
    assert Path(fetched(config()).model.path).is_dir()


def test_a_hub_that_never_answers_is_given_up_for_the_cache(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, model)

    def fetched_in_silence() -> str:
        with monkeypatch.context() as patched:
            patched.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
            hub.answers.clear()
            try:
                return fetched(config()).model.path
            finally:
                hub.answers.set()

    with pytest.raises(ConfigError, match=rf"cannot be fetched from {hub.url} \(\w+Timeout: "):
        fetched_in_silence()
    found = fetched(config()).model.path
    assert fetched_in_silence() == found


def test_no_half_a_file_is_used(hub: Hub, model: Path) -> None:
    hub.push(NAME, model)
    hub.shortened.add("model.safetensors")
    assert "Consistency check failed" in refusal()
    hub.shortened.clear()
    assert (Path(fetched(config()).model.path) / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()


@pytest.mark.extended
def test_a_connection_that_breaks_each_time_is_given_up(hub: Hub, model: Path) -> None:
    hub.push(NAME, model)
    hub.truncated.add("model.safetensors")  # after five attempts of the library
    assert "RemoteProtocolError" in refusal()
    hub.truncated.clear()
    assert Path(fetched(config()).model.path).is_dir()


def test_offline_uses_the_cache_and_nothing_else(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, model)
    described(config())  # without the weights
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    line = (
        f"model.path: {NAME} is no directory here, and not whole in the cache {constants.HF_HUB_CACHE}, "
        "and HF_HUB_OFFLINE is set; unset it, or name a directory"
    )
    assert refusal() == line
    assert refusal(name="org/other") == line.replace(NAME, "org/other")
    assert not hub.seen
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    whole = fetched(config())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    assert fetched(config()) == whole
    assert not hub.seen


def test_weights_must_be_whole_safetensors(hub: Hub, model: Path) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    weights = files.pop("model.safetensors")
    hub.push(NAME, {**files, "pytorch_model.bin": b""})
    assert refusal() == (
        f"model.path: {NAME} has no model.safetensors; name a model with weights in the format safetensors"
    )
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = json.dumps({"weight_map": shards}).encode()
    hub.push(NAME, {**files, "model.safetensors.index.json": index, "model-1.safetensors": weights})
    assert f"{NAME} has no model-2.safetensors" in refusal()
    hub.push(NAME, {**files, "model.safetensors.index.json": b"[]"})
    assert "model.safetensors.index.json is damaged" in refusal()


def test_a_resumed_run_keeps_its_commit_without_asking_the_hub(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = hub.push(NAME, model)
    local, models = described(config())
    fetch(local, models)
    layout = RunLayout(tmp_path)
    write_json(layout.hub, models)
    other = hub.push(NAME, save_model(tmp_path / "other", 2))
    hub.seen.clear()
    again, kept = described(config(), sources_of(layout))
    fetch(again, kept)
    assert (again, kept) == (local, models)
    assert not hub.seen
    assert described(config(revision=first), kept)[0].model.path == local.model.path
    for section, path in (({"revision": other}, "revision"), ({"name": "org/b"}, "path")):
        with pytest.raises(
            ConfigError, match=rf"^model.{path}: the run started with .*start a new run without"
        ):
            described(config(**section), kept)
    assert Path(described(config())[0].model.path).name == other
    layout.hub.write_text('[{"key":')
    with pytest.raises(ConfigError, match=r"hub.json: is damaged"):
        sources_of(layout)


def test_a_teacher_of_a_hub_leaves_its_weights_to_its_vllm(hub: Hub, model: Path) -> None:
    hub.push(NAME, model)
    sections = {
        "model": {"path": str(model)},
        "trainer": {"learning_rate": 1e-3, "distillation": {"kind": "top_k"}},
    }
    teacher = {"path": NAME, "revision": "main"}
    with_vllm = validate({**sections, "teacher": {**teacher, "vllm_url": "http://127.0.0.1:9"}})
    directory = Path(fetched(with_vllm).teacher.path)
    assert not (directory / "model.safetensors").exists()
    assert Path(fetched(validate({**sections, "teacher": teacher})).teacher.path) == directory
    assert (directory / "model.safetensors").exists()


def test_a_data_set_is_fetched_for_the_checks_at_one_commit(hub: Hub, tmp_path: Path) -> None:
    files = {
        "README.md": b"---\n---\n",
        "main/train.jsonl": b"{}\n",
        "main/test.jsonl": b"{}\n",
        "a.bin": b"",
    }
    commit = hub.push("org/sums", files)

    def directory(**section: Any) -> Path:
        environment = {"sums": {"entry": "a:B", "dataset": {"path": "org/sums", **section}}}
        local, sources = described(validate({"environment": environment, "base_dir": str(tmp_path)}))
        assert sources == (
            HubSource(key="environment.sums.dataset", name="org/sums", revision="", commit=commit),
        )
        fetch(local, sources)  # nothing is left to fetch
        return Path(local.environment["sums"].dataset.path)

    train = directory(files=["main/train*"])
    assert {str(path.relative_to(train)) for path in train.rglob("*.*")} == {"README.md", "main/train.jsonl"}
    assert (directory() / "main" / "test.jsonl").is_file()
    (tmp_path / "org").mkdir()
    (tmp_path / "org/sums").mkdir()  # a directory beside the configuration goes first
    environment = {"sums": {"entry": "a:B", "dataset": {"path": "org/sums"}}}
    assert described(validate({"environment": environment, "base_dir": str(tmp_path)}))[1] == ()


def test_a_missing_data_set_is_refused_by_its_key(hub: Hub, tmp_path: Path) -> None:
    environment = {"sums": {"entry": "a:B", "dataset": {"path": "org/none"}}}
    with pytest.raises(ConfigError) as refused:
        described(validate({"environment": environment, "base_dir": str(tmp_path)}))
    assert str(refused.value).startswith(
        f"environment.sums.dataset.path: org/none is neither a directory here nor a data set of {hub.url}; "
    )


def test_a_data_set_is_that_of_its_environment_whatever_the_name(hub: Hub) -> None:
    """A name was cut at its first dot: it was unknown, or another environment got the data set."""
    names = {"math": "org/one", "math.v2": "org/two"}
    commits = {env: hub.push(name, {"a.jsonl": env.encode()}) for env, name in names.items()}
    environment = {env: {"entry": "a:B", "dataset": {"path": name}} for env, name in names.items()}
    local, sources = described(validate({"environment": environment}))
    assert {env: Path(local.environment[env].dataset.path).name for env in names} == commits
    assert [one.key for one in sources] == ["environment.math.dataset", "environment.math.v2.dataset"]


ROWS = [{"sum": f"{number}="} for number in range(4)]


@pytest.fixture
def of_a_hub(hub: Hub, base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a configuration whose tasks are of a hub. Rows come from the fetched directory alone."""
    hub.push("org/sums", {"a.jsonl": b"{}"})
    (base_dir / "tried.py").write_text(
        "from rolloutmq import RowTurn\n\n\nclass Sums(RowTurn):\n    max_tokens = 2\n\n"
        "    def prompt(self, task):\n        return task['sum']\n\n"
        "    def score(self, task, completion):\n        return float(len(completion.text))\n"
    )

    def open_rows(_key: str, section: DatasetConfig, base_dir: Path) -> tuple[Any, Any]:
        assert (base_dir / section.path / "a.jsonl").is_file(), f"{section.path} was not fetched"
        return ROWS, ROWS

    monkeypatch.setattr(loader, "open_rows", open_rows)
    section = {"entry": "tried.py:Sums", "group_size": 2, "dataset": {"path": "org/sums"}}
    return {
        "environment": {"e": section},
        "model": {"alphabet": "0123456789="},
        "base_dir": str(base_dir),
    }


def test_tasks_of_a_hub_are_tried_without_a_run(
    of_a_hub: dict[str, Any], hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment was loaded before its data set was fetched."""
    other = {"entry": "a:B", "dataset": {"path": "org/none"}}  # is not the one that is tried
    given = validate({**of_a_hub, "environment": {**of_a_hub["environment"], "other": other}})
    assert try_rollouts(given, "e", TryOptions()) == 0
    told = capsys.readouterr()
    assert told.err == f"looking up org/sums at {hub.url}\n"
    assert "rollout 1 of 1: 2 sequences" in told.out


def test_tasks_of_a_hub_are_scored_repeatedly(
    of_a_hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(env: str, config: RunConfig) -> Any:
        return repeat.scored(
            loader.load_environment(env, config.environment[env], config.base_dir), config, env
        )

    monkeypatch.setattr(repeat, "elsewhere", elsewhere)
    assert [one.verdict for one in repeat.examine("e", validate(of_a_hub))] == ["same"] * 3


def test_an_environment_without_its_data_set_is_not_loaded(
    of_a_hub: dict[str, Any], hub: Hub, base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was, while the data set was still to be fetched, or could not be: a second error beside the right one."""
    tried: list[list[str]] = []

    def try_environments(_config: RunConfig, names: list[str], **_: Any) -> tuple[()]:
        tried.append(names)
        return ()

    monkeypatch.setattr(checks, "try_environments", try_environments)
    of_a_hub["environment"]["e"]["dataset"]["path"] = "org/none"
    of_a_hub["environment"]["other"] = {"entry": "tried.py:Sums"}
    [problem] = examine(validate(of_a_hub)).problems
    assert str(problem).startswith("environment.e.dataset.path: org/none is neither a directory here")
    hub.seen.clear()
    file = base_dir / "config.toml"
    file.write_text(
        '[environment.e]\nentry = "tried.py:Sums"\n[environment.e.dataset]\npath = "org/sums"\n'
        '[environment.other]\nentry = "tried.py:Sums"\n[trainer]\nstepz = 1\n'
    )
    with pytest.raises(ConfigError, match=r"^trainer\.stepz: unknown key"):
        loaded(file, environ={})
    assert tried == [["other"], ["other"]]
    assert not hub.seen


def test_the_checks_name_the_model_among_other_errors(hub: Hub) -> None:
    given = validate(
        {
            "environment": {"e": {"entry": "no_such_module.env:Env"}},
            "model": {"path": "org/none"},
            "teacher": {"path": "org/teacher"},
            "trainer": {"learning_rate": 1e-3, "distillation": {"kind": "top_k"}},
        }
    )
    lines = [str(problem) for problem in examine(given).problems]
    assert [line.partition(":")[0] for line in lines] == ["environment.e.entry", "model.path", "teacher.path"]
    assert all(hub.url in line for line in lines[1:])


def test_check_refuses_a_model_that_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    assert hub.url == os.environ["HF_ENDPOINT"]
    told = checked(tmp_path, "model.path=org/none", "trainer.learning_rate=1e-3")
    assert told.returncode == 2
    assert re.search(r"model\.path: org/none is neither a directory here nor a model of http", told.stdout)
    assert "Traceback" not in told.stdout + told.stderr


def checked(tmp_path: Path, *assignments: str) -> "subprocess.CompletedProcess[str]":
    sets = [word for text in assignments for word in ("--set", text)]
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "check", str(QUICKSTART), *sets]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)


@pytest.mark.extended
def test_a_run_trains_a_model_of_a_hub_and_resumes_with_the_same(
    hub: Hub, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub.push(NAME, model)
    told = (f"model.path={NAME}", "trainer.checkpoint_interval=2")
    root = tmp_path / "run"
    code, summary = scenario.run(root, (*told, "trainer.steps=4"), config=QUICKSTART)
    assert (code, summary["steps"]) == (0, 4)
    [record] = sources_of(RunLayout(root))
    assert record == HubSource(key="model", name=NAME, revision="", commit=first)
    used = json.loads(RunLayout(root).config.read_text())["model"]
    assert (Path(used["path"]).name, used["revision"]) == (first, "")
    assert f"from a hub key=model name={NAME} commit={first}" in RunLayout(root).log("up").read_text()
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.push(NAME, {**files, "config.json": b"{}"})  # it would not load
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, summary = scenario.run(root, (*told, "trainer.steps=6"), config=QUICKSTART, flags=("--resume",))
    assert (code, summary["steps"]) == (0, 6)
    assert sources_of(RunLayout(root)) == [record]


@pytest.mark.extended
def test_a_policy_of_a_hub_is_tried_without_a_run(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.push(NAME, model)
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "try", str(QUICKSTART), "--size", "2"]
    command += ["--set", f"model.path={NAME}"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert f"looking up {NAME} at {hub.url}" in told.stderr


def test_a_broker_alone_writes_the_directory_into_its_run(hub: Hub, model: Path, tmp_path: Path) -> None:
    commit = hub.push(NAME, model)
    root = tmp_path / "run"
    prepare_service(root, None, [f"model.path={NAME}"], fetched)
    written = json.loads(RunLayout(root).config.read_text())
    assert Path(written["model"]["path"]).name == commit
