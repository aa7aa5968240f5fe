"""`rolloutmq keys`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.launch.cli import app
from rolloutmq.schemas.errors import ConfigError, MissingError
from rolloutmq.schemas.network.keys import Role


def said(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["keys", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_a_key_from_its_directory_to_its_revocation(tmp_path: Path) -> None:
    directory, file = tmp_path / "keys", tmp_path / "w.key"
    assert f"`rolloutmq keys new {directory} NAME --role ROLE`" in said("init", directory)
    assert f"wrote {file}: carry it to the host of w-1" in said(
        "new", directory, "w-1", "--role", "worker", "--out", file
    )
    bundle = load_bundle(file)
    assert (bundle.name, bundle.role, bundle.ca) == ("w-1", Role.WORKER, "")
    (known,) = json.loads(said("list", directory, "--json"))
    assert (known["name"], known["role"], known["public"], known["revoked"]) == (
        "w-1",
        "worker",
        bundle.public,
        None,
    )
    assert "valid" in said("list", directory)
    assert said("revoke", directory, "w-1") == "revoked w-1\n"
    assert "revoked 20" in said("list", directory)
    assert bundle.secret not in said("list", directory, "--json")


def test_the_file_is_named_after_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said("init", "keys")
    said("new", "keys", "t", "--role", "trainer")
    assert load_bundle(tmp_path / "t.key").role is Role.TRAINER


def test_no_key_is_made_for_a_file_that_exists(tmp_path: Path) -> None:
    directory, file = tmp_path / "keys", tmp_path / "w.key"
    said("init", directory)
    file.touch()
    with pytest.raises(ConfigError, match="exists, and is not written over"):
        said("new", directory, "w", "--role", "worker", "--out", file)
    assert KeyDirectory(directory).records() == ()


def test_certificates_travel_with_the_key(tmp_path: Path) -> None:
    directory, ca = tmp_path / "keys", tmp_path / "ca.pem"
    said("init", directory)
    ca.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"--ca: must be a file with certificates in PEM"):
        said("new", directory, "w", "--role", "worker", "--out", tmp_path / "w.key", "--ca", ca)
    ca.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    said("new", directory, "w", "--role", "worker", "--out", tmp_path / "w.key", "--ca", ca)
    assert load_bundle(tmp_path / "w.key").ca == ca.read_text()


def test_an_unknown_role_names_the_roles(tmp_path: Path) -> None:
    refused = said("new", tmp_path, "w", "--role", "boss", code=2)
    assert all(role.value in refused for role in Role)


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="make keys with `rolloutmq keys init"):
        said("list", tmp_path / "none")


def test_a_certificate_goes_from_its_directory_to_the_clients(tmp_path: Path) -> None:
    directory, file = tmp_path / "keys", tmp_path / "w.key"
    told = said("init", directory, "--tls", "gpu-7", "--tls", "10.0.0.7")
    assert f'set run.tls_cert = "{directory}/tls.pem"' in told
    said("new", directory, "w", "--role", "worker", "--out", file)
    assert load_bundle(file).ca == (directory / "ca.pem").read_text()
    before = (directory / "tls.pem").read_bytes()
    said("tls", directory, "gpu-7", "gpu-8")
    assert (directory / "tls.pem").read_bytes() != before
    with pytest.raises(MissingError):
        said("tls", tmp_path / "none", "gpu-7")
