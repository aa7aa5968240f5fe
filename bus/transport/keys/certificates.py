"""A small certificate authority in a key directory, for runs without another one. Needs the extra `cluster`.

ca.pem, ca.key      the authority: clients trust the first, the second stays here
tls.pem, tls.key    certificate and key of the run's HTTP servers, for all of their names

A server's certificate is replaced by making another one: running servers read it.
"""

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rolloutmq.bus.files import PRIVATE_FILE
from rolloutmq.bus.transport.keys.key_files import require_secret
from rolloutmq.schemas.errors import ConfigError, MissingError, UnusablePathError

if TYPE_CHECKING:
    from cryptography import x509

CA: Final = "ca.pem"
CA_KEY: Final = "ca.key"
CERT: Final = "tls.pem"
KEY: Final = "tls.key"
CA_DAYS: Final = 3650
DAYS: Final = 397
"""Days of a server's certificate: browsers accept no longer ones."""
_OWN: Final = ("localhost", "127.0.0.1", "::1")
"""Names by which processes of the server's own host reach it."""
_SKEW: Final = datetime.timedelta(hours=1)
"""The clocks of other hosts may be behind."""


def make_certificate(directory: Path, hosts: Sequence[str], days: float = DAYS) -> None:
    """Write a certificate for hosts, and its key; make the authority first if there is none. The hosts of an earlier
    certificate must be named again.

    Args:
        directory: A key directory.
        hosts: Names and addresses by which clients reach the servers; those of loopback are added.
        days: Life of the certificate.

    Raises:
        MissingError: The package cryptography is absent.
        ConfigError: A name is none, or the authority is damaged.
        NotPrivateError: Others may read its key.
        UnusablePathError: A file cannot be read or written.
    """
    require_cryptography()
    names = [_name(host) for host in dict.fromkeys((*hosts, *_OWN))]
    try:
        authority, signing = _authority(directory)
        certificate, key = _signed(hosts[0], names, authority, signing, days)
        _write(directory / KEY, _pem_of_key(key))
        _write(directory / CERT, _pem(certificate))
    except OSError as error:
        raise UnusablePathError(f"key directory {directory}", error.strerror or str(error)) from error


def require_cryptography() -> None:
    """Require the package that makes certificates. MissingError if it is absent."""
    try:
        import cryptography  # noqa: F401 - only to know
    except ImportError:
        raise MissingError("the package cryptography", "pip install 'rolloutmq[cluster]'") from None


def _name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError("--tls", f"must be a name or an address of a host (got {host!r})") from None


def _authority(directory: Path) -> tuple["x509.Certificate", Any]:
    """Return the authority of a directory and its key; make it if there is none."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path, secret = directory / CA, directory / CA_KEY
    if not path.exists() and not secret.exists():
        made, key = _root()
        _write(secret, _pem_of_key(key))
        _write(path, _pem(made))
        return made, key
    try:
        with secret.open("rb") as file:
            require_secret(secret, os.fstat(file.fileno()))
            return x509.load_pem_x509_certificate(path.read_bytes()), load_pem_private_key(file.read(), None)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise ConfigError(
            str(path),
            f"and {CA_KEY} must be an authority and its key ({error}); restore both, or remove both",
        ) from None


def _root() -> tuple["x509.Certificate", Any]:
    from cryptography import x509

    key = _new_key()
    name = _subject("RolloutMQ run")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _begun(name, name, key.public_key(), CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return _signed_by(builder, key), key


def _signed(
    host: str, names: Sequence["x509.GeneralName"], authority: "x509.Certificate", signing: Any, days: float
) -> tuple["x509.Certificate", Any]:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = _new_key()
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    builder = _begun(_subject(host[:64]), authority.subject, key.public_key(), days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(issuer, critical=False)
    return _signed_by(builder, signing), key


def _begun(subject: "x509.Name", issuer: "x509.Name", public: Any, days: float) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _SKEW).not_valid_after(now + datetime.timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _signed_by(builder: "x509.CertificateBuilder", key: Any) -> "x509.Certificate":
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _subject(name: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _pem(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _pem_of_key(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write(path: Path, data: bytes) -> None:
    """Replace a file, for this user alone."""
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(written.unlink, missing_ok=True)
        fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
