"""The run's own token: read from a private file, and made for a run with keys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.bus.files import write_private
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.run import RunConfig, RunSection
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.http_server.run_token import engine_token, http_token, with_own_token

TOKEN = "0123456789abcdef"


def with_file(path: Path, text: str | None) -> RunConfig:
    if text is not None:
        write_private(path, text.encode())
    return RunConfig(run=RunSection(http_token_file=Path(path.name)), base_dir=path.parent)


def test_the_token_is_in_a_file_beside_the_configuration(tmp_path: Path) -> None:
    run = with_file(tmp_path / "token", f"{TOKEN}\n")
    assert http_token(run) == TOKEN
    assert http_token(RunConfig()) == ""


@pytest.mark.parametrize(
    "text", [None, "", "short", "with a space in it", f"{TOKEN}\n{TOKEN}", "\u00e9" * 20]
)
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str | None) -> None:
    with pytest.raises(ConfigError, match=r"^run\.http_token_file: ") as refused:
        http_token(with_file(tmp_path / "token", text))
    assert not text or text not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o620, 0o601])
def test_a_token_that_others_may_know_is_refused(tmp_path: Path, mode: int) -> None:
    run = with_file(path := tmp_path / "token", TOKEN)
    path.chmod(mode)
    problem = rf"^run\.http_token_file: {path} .*mode {mode:04o}\); run chmod 600 {path},"
    with pytest.raises(ConfigError, match=problem) as refused:
        http_token(run)
    assert TOKEN not in str(refused.value)
    path.chmod(0o400)
    assert http_token(run) == TOKEN


def test_a_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, user = with_file(tmp_path / "token", TOKEN), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(
        ConfigError, match=rf"^run\.http_token_file: .* \(got user {user}\); use a file of your own"
    ):
        http_token(run)


def test_a_run_with_keys_makes_its_own_token_once(tmp_path: Path) -> None:
    layout, keyed = RunLayout(tmp_path), RunConfig(broker=BrokerConfig(keys="keys"))
    run = with_own_token(keyed, layout)
    token = http_token(run)
    assert len(token) == 43
    assert layout.http_token.stat().st_mode & 0o777 == 0o600
    assert http_token(with_own_token(keyed, layout)) == token, "a life after this one has the same"
    assert with_own_token(RunConfig(), layout) == RunConfig()
    named = with_file(tmp_path / "token", TOKEN).model_copy(update={"broker": keyed.broker})
    assert with_own_token(named, layout) == named


def test_engines_of_a_key_get_a_token_of_their_own() -> None:
    made = engine_token(TOKEN, "engine-7")
    assert made == engine_token(TOKEN, "engine-7")
    assert len(made) == 43
    assert len({made, engine_token(TOKEN, "engine-8"), engine_token(TOKEN + "0", "engine-7"), TOKEN}) == 4
    assert engine_token("", "engine-7") == engine_token(TOKEN, "") == ""


def test_a_kill_while_the_token_is_made_leaves_no_empty_file(tmp_path: Path) -> None:
    """Every later start refused an empty file."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from rolloutmq.schemas.config.broker import BrokerConfig\n"
        "from rolloutmq.schemas.config.run import RunConfig\n"
        "from rolloutmq.schemas.files import RunLayout\n"
        "from rolloutmq.services.http_server import run_token\n"
        "run_token.secrets.token_urlsafe = lambda _: os._exit(9)\n"
        "run_token.with_own_token(RunConfig(broker=BrokerConfig(keys='keys')), RunLayout(Path(sys.argv[1])))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == 9
    layout, keyed = RunLayout(tmp_path), RunConfig(broker=BrokerConfig(keys="keys"))
    assert len(http_token(with_own_token(keyed, layout))) == 43
    assert [one.name for one in tmp_path.iterdir()] == ["http_token"]
