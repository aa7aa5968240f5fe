import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.launch import local
from rolloutmq.launch.commands import gateway
from rolloutmq.launch.plan import plan
from rolloutmq.launch.results import conclude
from rolloutmq.launch.settings import load
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.services.gateway.server import bind
from rolloutmq.services.monitor.liveness import Fate, RunLiveness


def alone(*more: str) -> RunConfig:
    return load(None, environ={}, assignments=[*gateway.ALONE, *more])


def test_alone_it_is_a_broker_telemetry_and_a_gateway(run_dir: Path) -> None:
    config = alone()
    roles = [spec.role for spec in plan(config, RunLayout(run_dir), "python")]
    assert roles == [Role.BROKER, Role.TELEMETRY, Role.GATEWAY]
    assert config.unconfigured.stale == "pass", "groups without versions are never too old"
    assert not config.unconfigured.pacing


def test_an_asgi_server_of_ones_own_needs_no_process(run_dir: Path) -> None:
    roles = [spec.role for spec in plan(alone("gateway.listen=false"), RunLayout(run_dir), "python")]
    assert Role.GATEWAY not in roles


def test_a_port_that_is_taken_is_said_before_anything_starts(run_dir: Path) -> None:
    with bind(GatewayConfig(port=0), None) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        config = alone(f"gateway.port={port}", f'run.dir="{run_dir}"')
        with pytest.raises(AddressInUseError, match=str(port)):
            local.up(config, local.UpOptions(plain=True))
    assert not (run_dir / "logs" / "broker.log").exists()


def test_the_end_says_how_to_go_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conclude(alone(), RunLayout(run_dir), "interrupted")
    said = capsys.readouterr().out
    assert f"rolloutmq gateway --run-dir {run_dir}" in said
    assert "trained" not in said, "nobody here knows what was learned"


def test_an_alias_is_the_command_and_shadows_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    own.mkdir()
    theirs.mkdir()
    monkeypatch.setenv("PATH", str(theirs))
    script = gateway.alias(own)
    shown = subprocess.run([script, "--reload", "--help"], capture_output=True, text=True, check=True)
    assert "in place of `run-api`" in " ".join(shown.stdout.split())
    with pytest.raises(ConfigError, match="already installed"):
        gateway.alias(own)
    script.unlink()
    atropos = theirs / "run-api"
    atropos.write_text("#!/bin/sh\n")
    atropos.chmod(0o755)
    with pytest.raises(ConfigError, match=str(atropos)):
        gateway.alias(own)
    assert not script.exists()


def test_the_command_tells_of_a_wrong_option(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "gateway", "--run-dir", str(tmp_path / "r")]
    ended = subprocess.run(
        [*command, "--set", "gateway.gzip_level=11"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert ended.returncode == 2
    assert "gateway.gzip_level" in ended.stderr


def test_an_address_that_others_reach_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "gateway", "--run-dir", str(tmp_path / "r")]
    ended = subprocess.run(
        [*command, "--host", "0.0.0.0", "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "gateway.host: " in ended.stderr
    assert "gateway.insecure = true" in ended.stderr
    assert not (tmp_path / "r").exists()


def test_an_address_for_a_running_run_is_checked_as_well(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLayout(run_dir).config.write_text(alone().model_dump_json())
    served: list[GatewayConfig] = []

    def noted(_: Path, config: GatewayConfig) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(gateway, "fate_of", lambda _: Fate(RunLiveness.LIVING))
    monkeypatch.setattr(gateway, "serve", noted)

    def serve(host: str | None, *more: str) -> int:
        return gateway.gateway(run_dir, host, 81, None, more, plain=True, broker_only=False)

    with pytest.raises(ConfigError, match=r"gateway\.insecure = true"):
        serve("0.0.0.0")
    assert not served
    assert serve("0.0.0.0", "gateway.insecure=true") == serve(None) == 0
    assert [(config.host, config.port) for config in served] == [("0.0.0.0", 81), ("127.0.0.1", 81)]
