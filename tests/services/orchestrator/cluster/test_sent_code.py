"""What stays on the host of the run: its secrets, under any name, and all run directories."""

from pathlib import Path

import pytest

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.orchestrator.cluster.ray_backend import EXCLUDES
from rolloutmq.services.orchestrator.cluster.sent_code import excluded


def config(base: Path, keys: str = "", **run: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "base_dir": base,
            "environment": {"e": {"entry": "e.py:E"}},
            "broker": {"listen": "tcp://127.0.0.1:7000", "insecure": not keys, "keys": keys},
            "cluster": {"engine": "ray"},
            "run": run,
        }
    )


def test_secrets_beside_the_code_are_not_sent(tmp_path: Path) -> None:
    base, layout = tmp_path / "cfg", RunLayout(tmp_path / "cfg" / "own" / "a")
    layout.root.mkdir(parents=True)
    (base / "secret").mkdir()
    (base / "keys").symlink_to("secret")
    key = tmp_path / "tls.key"
    key.touch()
    run = {"http_token_file": "http.token", "tls_cert": "c.pem", "tls_key": str(key)}
    found = excluded(config(base, "keys", **run), layout)
    assert sorted(found) == ["/http.token", "/keys", "/own/a", "/secret"]
    assert "*.key" in EXCLUDES


def test_other_runs_are_not_sent_wherever_they_are(tmp_path: Path) -> None:
    for place in ("mine/one", "mine/two/logs", "other/three/logs", "code/logs", "runs/four/logs"):
        (tmp_path / place).mkdir(parents=True)
    for file in (
        "mine/two/config.json",
        "other/three/config.json",
        "code/config.py",
        "runs/four/config.json",
    ):
        (tmp_path / file).touch()
    found = excluded(config(tmp_path), RunLayout(tmp_path / "mine/one"))
    assert sorted(found) == ["/mine/one", "/mine/two", "/other/three"]  # all of `runs` is left out anyway


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Ray names it so
@pytest.mark.parametrize(
    "name", ["[a]*.token", "!token", "#token", "a b ", "back\\slash", "a?", "**", "new\nline"]
)
def test_a_secret_is_left_out_whatever_its_name(tmp_path: Path, name: str) -> None:
    pathspec = pytest.importorskip("pathspec", reason="Ray reads the lines with it")
    found = excluded(config(tmp_path, http_token_file=name), RunLayout(tmp_path.parent / "run"))
    lines = pathspec.PathSpec.from_lines("gitwildmatch", [*EXCLUDES, *found])
    assert lines.match_file(name)
    assert not any(map(lines.match_file, ("a.token", "b", "token/x.py", f"below/{name}")))
