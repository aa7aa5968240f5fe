"""The authority of a key directory: made once, its certificates as often as needed, and all of it private."""

import stat
import sys
from pathlib import Path

import pytest

from rolloutmq.bus.transport.keys.certificates import CA, CA_KEY, CERT, KEY, make_certificate
from rolloutmq.schemas.errors import ConfigError, MissingError, NotPrivateError, UnusablePathError

pytest.importorskip("cryptography")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    made.mkdir(mode=0o700)
    return made


def test_the_authority_stays_and_certificates_are_renewed(directory: Path) -> None:
    make_certificate(directory, ["gpu-7"])
    files = {name: (directory / name).read_bytes() for name in (CA, CA_KEY, CERT, KEY)}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert len(list(directory.iterdir())) == 4
    make_certificate(directory, ["gpu-7", "gpu-8"])
    again = {name: (directory / name).read_bytes() for name in files}
    assert {name for name in files if files[name] == again[name]} == {CA, CA_KEY}


@pytest.mark.parametrize("host", ["gr\u00fcn.example"])
def test_a_wrong_name_is_refused(directory: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"^--tls: must be a name or an address of a host \(got "):
        make_certificate(directory, [host])
    assert not list(directory.iterdir())


@pytest.mark.parametrize("name", [CA, CA_KEY])
def test_half_or_damaged_authority_is_refused(directory: Path, name: str) -> None:
    make_certificate(directory, ["gpu-7"])
    (directory / name).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="must be an authority and its key"):
        make_certificate(directory, ["gpu-7"])
    (directory / name).unlink()
    with pytest.raises(ConfigError, match="must be an authority and its key"):
        make_certificate(directory, ["gpu-7"])


def test_an_authority_that_others_may_read_is_refused(directory: Path) -> None:
    make_certificate(directory, ["gpu-7"])
    (directory / CA_KEY).chmod(0o644)
    with pytest.raises(NotPrivateError, match=r"ca\.key"):
        make_certificate(directory, ["gpu-7"])


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnusablePathError, match="No such file"):
        make_certificate(tmp_path / "none", ["gpu-7"])


def test_without_the_package_the_extra_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingError, match=r"pip install 'rolloutmq\[cluster\]'"):
        make_certificate(directory, ["gpu-7"])
