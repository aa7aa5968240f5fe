"""A run of another host names only what the user of this host allows."""

from pathlib import Path
from typing import Any

import pytest

from rolloutmq.launch.commands.remote.own_code import SLOTS_LIMIT, OwnCode
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError

FILES = {
    "env.py": "from os import system\n\nclass Env:\n    pass\n\n\nasync def rated(task, answer):\n    return 1.0\n",
    "inner/deep.py": "class Env:\n    pass\n",
    "pack/__init__.py": "",
    "pack/module.py": "class Env:\n    pass\n",
    "rows/a.jsonl": '{"a": 1}\n',
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory of code, with links that leave it, beside a secret."""
    for name, text in FILES.items():
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "secret.py").write_text("class X:\n    pass\n")
    (tmp_path / "code" / "link.py").symlink_to(tmp_path / "secret.py")
    (tmp_path / "code" / "linked").symlink_to(tmp_path)
    (tmp_path / "code" / "loop.py").symlink_to("loop.py")
    (tmp_path / "code" / "outer").mkdir()
    (tmp_path / "code" / "outer" / "__init__.py").symlink_to(tmp_path / "secret.py")
    return tmp_path / "code"


def require(own: OwnCode, **section: Any) -> None:
    own.require("e", EnvironmentConfig.model_validate({"entry": "env.py:Env", **section}))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"entry": "inner/deep.py:Env"},
        {"entry": "pack.module:Env"},
        {"entry": "pack:Env"},
        {"dataset": {"path": "rows", "files": ["*.jsonl"]}},
        {"dataset": {"path": "rows/a.jsonl"}},
        {"rewards": {"raters": {"r": {"rater": "env.py:rated"}}}},
        {"rewards": {"raters": {"r": {"rater": "exact"}}}},
        {"options": {"plain": "text", "deep": [{"url": "https://host/x"}]}},
    ],
)
def test_what_is_in_the_directory_is_accepted(code: Path, section: dict[str, Any]) -> None:
    require(OwnCode.of(code), **section)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"entry": "os:system"}, "environment.e.entry: the module os is not in"),
        ({"entry": "subprocess:Popen"}, "it with --allow-module subprocess"),
        ({"entry": "../secret.py:X"}, "environment.e.entry: must be a path below"),
        ({"entry": "inner/../../secret.py:X"}, "must be a path below"),
        ({"entry": "/etc/passwd.py:X"}, "must be a path below"),
        ({"entry": "~/x.py:X"}, "must be a path below"),
        ({"entry": "link.py:X"}, "a link leads out of"),
        ({"entry": "loop.py:X"}, "a link leads to itself"),
        ({"dataset": {"path": "loop.py"}}, "a link leads to itself"),
        ({"entry": "linked/secret.py:X"}, "a link leads out of"),
        ({"entry": "outer:X"}, "a link leads out of"),
        ({"entry": "missing.py:X"}, "there is no file missing.py in"),
        ({"entry": "a b:X"}, "is neither a .py file nor a module"),
        ({"entry": "", "verifiers": "wordle"}, "the package wordle is not allowed"),
        (
            {"options": {"key": "env:HOME"}},
            "environment.e.options: `env:HOME` would read a variable of this host",
        ),
        ({"options": {"deep": [{"key": "env:SECRET"}]}}, "allow it with --allow-variable SECRET"),
        ({"dataset": {"path": "/etc"}}, "environment.e.dataset.path: must be a path below"),
        ({"dataset": {"path": "../"}}, "must be a path below"),
        ({"dataset": {"path": "linked"}}, "a link leads out of"),
        ({"dataset": {"path": "openai/gsm8k"}}, "another host fetches no data set of a hub"),
        (
            {"dataset": {"path": "rows", "files": ["../../*"]}},
            "environment.e.dataset.files: must be a path below",
        ),
        ({"dataset": {"path": "rows", "files": ["https://host/x.jsonl"]}}, "without `..` or a URL"),
        ({"rewards": {"raters": {"r": {"rater": "os:system"}}}}, "raters.r.rater: the module os is not in"),
        (
            {"rewards": {"raters": {"r": {"rater": "env.py:system"}}}},
            "env.py defines no function `system` itself",
        ),
        ({"rewards": {"raters": {"r": {"rater": "../x.py:f"}}}}, "raters.r.rater: must be a path below"),
        ({"rewards": {"raters": {"r": {"rater": "polite"}}}}, "does not load raters of packages by name"),
        (
            {"rewards": {"raters": {"r": {"rater": "env.py:rated", "options": {"k": "env:TOKEN"}}}}},
            "raters.r.options: `env:TOKEN`",
        ),
        ({"concurrency": SLOTS_LIMIT + 1}, "concurrency: must be at most 4096 on another host (got 4097)"),
        ({"entry": "", "command": ["sh"], "pacing": False, "stale": "pass"}, "is a program"),
    ],
)
def test_what_a_hostile_run_names_is_refused(code: Path, section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        require(OwnCode.of(code), **section)
    assert problem in str(raised.value)


def test_what_the_user_allows_is_accepted(code: Path) -> None:
    own = OwnCode.of(code, ["os", "wordle", "a.b"], ["HOME"])
    require(own, entry="os:system")
    require(own, entry="os.path:join")
    require(own, entry="a.b.c:X")
    require(own, entry="", verifiers="owner/wordle")
    require(own, options={"key": "env:HOME"})
    with pytest.raises(ConfigError, match="a is not in"):
        require(own, entry="a:X")
    with pytest.raises(ConfigError, match="osx is not in"):
        require(own, entry="osx:X")


def test_an_installed_module_is_not_taken_for_one_in_the_directory(code: Path) -> None:
    (code / "json.py").write_text("class Env:\n    pass\n")
    with pytest.raises(ConfigError, match="the module json is not in"):
        require(OwnCode.of(code), entry="json:Env")


def test_wrong_command_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--code: there is no directory"):
        OwnCode.of(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"--allow-module: must be the name of a module \(got 'a-b'\)"):
        OwnCode.of(tmp_path, ["a-b"])


def test_a_directory_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"^--code: (a link leads to itself|there is no directory)"):
        OwnCode.of(tmp_path / "loop")
