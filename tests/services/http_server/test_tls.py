"""Certificates of servers: checked, renewed without a restart, and accepted by name alone."""

import shutil
import ssl
import time
from pathlib import Path

import pytest
from tests.services.http_server.authority import pair

from rolloutmq.schemas.config.run import RunConfig, RunSection
from rolloutmq.schemas.errors import ConfigError, NotPrivateError
from rolloutmq.services.http_server.tls import (
    AGAIN_S,
    SOON_S,
    ServerTls,
    client_tls,
    load_certificate,
    problem_of_name,
    server_tls,
)

DAY_S = 86400.0


def trusting(ca: Path) -> ssl.SSLContext:
    context = client_tls(RunConfig(run=RunSection(tls_ca=ca)))
    assert context is not None
    return context


def test_a_client_accepts_the_names_of_the_certificate_alone(tmp_path: Path) -> None:
    made = pair(tmp_path / "a", "gpu-7.example", "10.0.0.7")
    tls, trust = ServerTls(made.cert, made.key), trusting(made.ca)
    for name in ("gpu-7.example", "10.0.0.7", "localhost", "127.0.0.1", "::1"):
        assert problem_of_name(tls.context, trust, name) == ""
    for name in ("gpu-8.example", "10.0.0.8"):
        assert "is not valid for" in problem_of_name(tls.context, trust, name)
    other = trusting(pair(tmp_path / "b").ca)
    assert "unable to get local issuer" in problem_of_name(tls.context, other, "localhost")
    assert client_tls(RunConfig()) is None


def test_a_run_without_a_certificate_speaks_plain_http(tmp_path: Path) -> None:
    assert server_tls(RunConfig()) is None
    made = pair(tmp_path / "a")
    section = RunSection(tls_cert=Path("a/tls.pem"), tls_key=Path("a/tls.key"))
    assert server_tls(RunConfig(run=section, base_dir=tmp_path)) is not None
    assert made.cert == tmp_path / "a" / "tls.pem"


@pytest.mark.parametrize(
    ("cert", "key", "problem"),
    [
        ("none.pem", "tls.key", r"^run\.tls_cert: .*none\.pem cannot be read: No such file"),
        ("tls.pem", "none.key", r"^run\.tls_key: .*none\.key cannot be read: No such file"),
        (".", "tls.key", r"^run\.tls_cert: .* cannot be read: Is a directory"),
        ("tls.pem", "ca.key", r"^run\.tls_cert: .*without a password \(key values mismatch\)"),
        ("tls.key", "tls.key", r"^run\.tls_cert: .*\(cannot be decoded\)"),
        ("tls.pem", "locked.key", r"^run\.tls_cert: .*without a password \(.*\)"),
        ("ca.pem", "ca.key", r"^run\.tls_cert: .*ca\.pem is no certificate of a server"),
    ],
)
def test_a_wrong_pair_is_refused(tmp_path: Path, cert: str, key: str, problem: str) -> None:
    pair(tmp_path)
    locked = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "locked.key").write_bytes(locked)
    (tmp_path / "locked.key").chmod(0o600)
    with pytest.raises(ConfigError, match=problem):
        load_certificate(tmp_path / cert, tmp_path / key)


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    made = pair(tmp_path)
    made.key.chmod(0o640)
    with pytest.raises(NotPrivateError, match=r"tls\.key"):
        load_certificate(made.cert, made.key)


@pytest.mark.parametrize("text", [None, "", "nothing"])
def test_a_file_without_certificates_to_trust_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "ca.pem").write_text(text)
    with pytest.raises(ConfigError, match=r"^run\.tls_ca: .*must be a file with certificates in PEM \("):
        trusting(tmp_path / "ca.pem")


def test_a_renewed_certificate_counts_without_a_restart(tmp_path: Path) -> None:
    now = [0.0]
    made = pair(tmp_path / "a", "old.example")
    tls, trust = ServerTls(made.cert, made.key, lambda: now[0]), trusting(made.ca)
    assert problem_of_name(tls.context, trust, "new.example") != ""
    pair(tmp_path / "a", "new.example")
    now[0] = 1.0
    assert problem_of_name(tls.context, trust, "new.example") == ""
    assert problem_of_name(tls.context, trust, "old.example") != ""


def test_half_a_renewal_leaves_the_certificate_of_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    made, newer = pair(tmp_path / "a", "old.example"), pair(tmp_path / "b", "new.example")
    tls, trust = ServerTls(made.cert, made.key, lambda: now[0]), trusting(made.ca)
    shutil.copy(newer.key, made.key)
    now[0] = 1.0
    assert problem_of_name(tls.context, trust, "old.example") == ""
    assert "certificate and key not read, those of before stay error=run.tls_cert: " in caplog.text
    shutil.copy(newer.cert, made.cert)
    now[0] = 2.0
    assert problem_of_name(tls.context, trusting(newer.ca), "new.example") == ""


@pytest.mark.parametrize(
    ("days", "said"), [(-0.02, "the certificate ended at"), (13.0, "the certificate ends at")]
)
def test_the_end_of_a_certificate_is_told_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: float, said: str
) -> None:
    now = [0.0]
    made = pair(tmp_path / "a", days=days)
    tls, trust = ServerTls(made.cert, made.key, lambda: now[0]), trusting(made.ca)
    problem_of_name(tls.context, trust, "localhost")
    assert caplog.text.count(said) == 1
    now[0] = AGAIN_S
    problem_of_name(tls.context, trust, "localhost")
    assert caplog.text.count(said) == 2


def test_a_certificate_comes_into_its_last_days(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wall = [time.time()]
    made = pair(tmp_path / "a", days=30)
    tls, trust = ServerTls(made.cert, made.key, wall=lambda: wall[0]), trusting(made.ca)
    problem_of_name(tls.context, trust, "localhost")
    assert "the certificate" not in caplog.text
    wall[0] += 30 * DAY_S - SOON_S + 60
    problem_of_name(tls.context, trust, "localhost")
    assert "the certificate ends at" in caplog.text
