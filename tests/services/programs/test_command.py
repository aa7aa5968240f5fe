"""The process of a program: arguments, variables, directory, and the address of the gateway."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.command import PLACEHOLDERS
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import GatewayAddress, RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.process import Restart
from rolloutmq.services.programs.command import RUN_DIR, ProgramCommands, check_command, split_path


def commands(
    layout: RunLayout, command: list[str], port: int = 8123, run: Mapping[str, str] = {}, **more: Any
) -> ProgramCommands:
    variables = {"A": "<{worker}>", "B": "env:PROGRAM_KEY"}
    environment = {"command": command, "group_size": 4, "concurrency": 6, "variables": variables}
    config = validate(
        {
            "run": {"seed": 40, **run},
            "environment": {"e": environment},
            "gateway": {"enabled": True, "port": port, **more},
            "inference": {"host": "0.0.0.0", "port": 9000, "insecure": True},
            "base_dir": str(layout.root),
        }
    )
    return ProgramCommands(config, layout)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROGRAM_KEY", "s3cret-{worker}")


def test_every_placeholder_is_filled(tmp_path: Path) -> None:
    made = commands(RunLayout(tmp_path), ["prog", *(f"{name}={{{name}}}" for name in PLACEHOLDERS)])
    spec = made.spec("e-2", "e", 2)
    assert spec.argv == (
        "prog",
        "worker=e-2",
        "number=2",
        "environment=e",
        "gateway_url=http://127.0.0.1:8123/w/e-2",
        "inference_url=http://127.0.0.1:9000/v1",
        f"run_dir={tmp_path}",
        "seed=42",
        "group_size=4",
        "concurrency=6",
        "enough_batches=3",
    )
    assert spec.env == {
        "A": "<e-2>",
        "B": "s3cret-{worker}",
        "ROLLOUTMQ_WORKER": "e-2",
        "ROLLOUTMQ_ENVIRONMENT": "e",
        "ROLLOUTMQ_GATEWAY_URL": "http://127.0.0.1:8123/w/e-2",
        "ROLLOUTMQ_RUN_DIR": str(tmp_path),
    }
    assert (spec.cwd, spec.foreign, spec.restart) == (str(tmp_path), True, Restart.ALWAYS)


def test_a_program_finds_what_to_trust(tmp_path: Path) -> None:
    run = {"tls_cert": "tls.pem", "tls_key": "tls.key", "tls_ca": "ca.pem"}
    spec = commands(RunLayout(tmp_path), ["prog", "{gateway_url}", "{inference_url}"], run=run).spec(
        "e-2", "e", 2
    )
    assert spec.env["ROLLOUTMQ_TLS_CA"] == str(tmp_path / "ca.pem")
    assert spec.argv[1:] == ("https://127.0.0.1:8123/w/e-2", "https://127.0.0.1:9000/v1")


def test_on_a_node_it_finds_what_the_node_reaches(tmp_path: Path) -> None:
    """The token is that of the workers' key, and the run directory that of the node."""
    layout = RunLayout(tmp_path)
    bundle = KeyDirectory.create(tmp_path / "keys").new("cluster-t", Role.WORKER)
    save_bundle(layout.cluster_key, bundle)
    write_private(tmp_path / "token", b"the-token-of-the-run-itself\n")
    config = validate(
        {
            "run": {"http_token_file": "token", "tls_cert": "t.pem", "tls_key": "t.key", "tls_ca": "ca.pem"},
            "broker": {"keys": "keys", "listen": "tcp://0.0.0.0:7000"},
            "cluster": {"engine": "ray", "host": "10.0.0.1"},
            "environment": {"e": {"command": ["prog", "{gateway_url}", "{inference_url}", "{run_dir}"]}},
            "gateway": {"enabled": True, "host": "0.0.0.0"},
            "inference": {"host": "10.0.0.2", "port": 9000},
            "base_dir": str(tmp_path),
        }
    )
    spec = ProgramCommands(config, layout).spec("e-1", "e", 1)
    assert spec.argv == (
        "prog",
        f"https://10.0.0.1:8000/t/{bundle.token}/w/e-1",
        f"https://10.0.0.2:9000/t/{bundle.token}/v1",
        RUN_DIR,
    )
    assert spec.env["ROLLOUTMQ_GATEWAY_URL"] == spec.argv[1]
    assert spec.env["ROLLOUTMQ_RUN_DIR"] == RUN_DIR
    assert "ROLLOUTMQ_TLS_CA" not in spec.env


def test_a_secret_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROGRAM_KEY")
    with pytest.raises(ConfigError, match=r"^environment\.e\.variables: `env:PROGRAM_KEY` .* not set"):
        commands(RunLayout(tmp_path), ["prog"]).spec("e-2", "e", 2)


def test_the_token_of_the_servers_is_in_their_addresses(tmp_path: Path) -> None:
    write_private(tmp_path / "token", b"0123456789abcdef")
    config = validate(
        {
            "run": {"http_token_file": "token"},
            "environment": {"e": {"command": ["prog", "{gateway_url}", "{inference_url}"]}},
            "gateway": {"enabled": True, "port": 8123},
            "inference": {"port": 9000},
            "base_dir": str(tmp_path),
        }
    )
    spec = ProgramCommands(config, RunLayout(tmp_path)).spec("e-2", "e", 2)
    assert spec.argv[1:] == (
        "http://127.0.0.1:8123/t/0123456789abcdef/w/e-2",
        "http://127.0.0.1:9000/t/0123456789abcdef/v1",
    )


def test_an_address_that_the_system_chose_is_that_of_a_living_gateway(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    made = commands(layout, ["{gateway_url}"], port=0)
    assert not made.can_start
    with subprocess.Popen([sys.executable, "-c", ""]) as earlier:
        pass
    write_json(layout.gateway, GatewayAddress(url="http://127.0.0.1:1", pid=earlier.pid))
    assert not made.can_start, "the next gateway may have another port"
    write_json(layout.gateway, GatewayAddress(url="http://127.0.0.1:2", pid=os.getpid()))
    ready: bool = made.can_start
    assert ready
    assert made.spec("e-0", "e", 0).argv == ("http://127.0.0.1:2/w/e-0",)
    assert commands(layout, ["x"], port=5).can_start


def test_a_program_that_is_not_there_is_told_before_the_start(tmp_path: Path) -> None:
    for missing in ("no-such-program", "./none.sh", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"environment\.e\.command: there is no program"):
            check_command("e", (missing,), tmp_path)
    here = tmp_path / "here.sh"
    here.write_text("")
    with pytest.raises(ConfigError):
        check_command("e", ("./here.sh",), tmp_path)  # it cannot be executed
    here.chmod(0o700)
    for found in ("./here.sh", str(here), "sh", "{run_dir}/later"):
        check_command("e", (found,), tmp_path)


@pytest.mark.parametrize(
    ("path", "worker", "rest"),
    [
        ("/status", "", "/status"),
        ("/w/e-0/status", "e-0", "/status"),
        ("/w/e-0", "e-0", "/"),
        ("/w/e-0/", "e-0", "/"),
        ("/w/", "", "/"),
        ("/w", "", "/w"),
        ("/w/e-0/w/e-1/status", "e-0", "/w/e-1/status"),
        ("/w//status", "", "/status"),
    ],
)
def test_the_path_tells_the_worker(path: str, worker: str, rest: str) -> None:
    assert split_path(path) == (worker, rest)
