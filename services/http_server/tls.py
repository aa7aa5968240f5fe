"""TLS of a run's HTTP servers and of its own clients, by files.

A server shows the certificate of `run.tls_cert`. A renewed one counts from the next connection on, without a restart;
while the pair of files does not fit, the one before stays. Clients of the run trust the certificates of `run.tls_ca`,
else those of their system, and check the name of the server.
"""

import contextlib
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rolloutmq.bus.files import regular_fd
from rolloutmq.bus.transport.keys.key_files import require_secret
from rolloutmq.bus.transport.keys.watched_file import WatchedFile
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.printable import printable

logger = logging.getLogger(__name__)

SOON_S: Final = 14 * 86400.0
"""Time before the end of a certificate from which its end is told."""
AGAIN_S: Final = 86400.0
"""Time between two such warnings."""
_WHENEVER: Final = ssl.VerifyFlags(0x200000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME: a certificate that has ended is read, too."""
_ROUNDS: Final = 16
"""Most steps of a handshake in memory; it takes three."""


class Certificate(NamedTuple):
    """A certificate with its key.

    Attributes:
        context: For the connections of a server.
        ends: End of the certificate, in wall-clock seconds.
        names: Names and addresses that it is for.
    """

    context: ssl.SSLContext
    ends: float
    names: tuple[str, ...] = ()

    def end(self, wall: float) -> str:
        """Return how long it lasts, and what to do."""
        ends = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.ends))
        state = "ended at" if self.ends <= wall else "ends at"
        return f"the certificate {state} {ends}; write a renewed one with its key over the files"


class ServerTls:
    """The certificate of one server. For one thread.

    Args:
        cert: Certificates in PEM, the server's first.
        key: Its private key in PEM.
        clock: Monotonic seconds.
        wall: Wall-clock seconds.

    Attributes:
        context: For the connections of the server; each gets the newest certificate.

    Raises:
        ConfigError: A file cannot be read, has no certificate or key, or the two do not fit.
        NotPrivateError: Others may read the key.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cert = cert
        self._clock = clock
        self._wall = wall
        self._told = -AGAIN_S
        self._watched = WatchedFile((cert, key), lambda: load_certificate(cert, key), "certificate and key")
        self.context = self._watched.value.context
        self.context.sni_callback = self._choose
        self._warn()

    @property
    def ends(self) -> float:
        """End of the certificate, in wall-clock seconds."""
        return self._watched.value.ends

    def end(self) -> str:
        """Return how long the certificate lasts, and what to do."""
        return self._watched.value.end(self._wall())

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a connection the newest certificate; OpenSSL calls it in each handshake, also without a name."""
        if self._watched.look(self._clock()):
            self._told = -AGAIN_S
            logger.info("certificate read file=%s", self._cert)
        self._warn()
        if (context := self._watched.value.context) is not connection.context:
            connection.context = context

    def _warn(self) -> None:
        """Log that the certificate ends soon, or has ended, once a day."""
        left_s, now = self.ends - self._wall(), self._clock()
        if left_s < SOON_S and now - self._told >= AGAIN_S:
            self._told = now
            logger.warning("%s: %s", self._cert, self.end())


def server_tls(run: RunConfig) -> ServerTls | None:
    """Return the certificate of a run's servers, None if they speak plain HTTP; raises what `ServerTls` raises."""
    files = tls_files(run)
    return ServerTls(*files) if files is not None else None


def tls_files(run: RunConfig) -> tuple[Path, Path] | None:
    """Return the files of certificate and key, None if the run has none."""
    cert, key = run.run.tls_cert, run.run.tls_key
    return (run.base_dir / cert, run.base_dir / key) if cert is not None and key is not None else None


def client_tls(run: RunConfig) -> ssl.SSLContext | None:
    """Return what clients of a run's own servers trust; None for what they trust anyway.

    Raises:
        ConfigError: `run.tls_ca` cannot be read, or has no certificate.
    """
    if run.run.tls_ca is None:
        return None
    path = run.base_dir / run.run.tls_ca
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "run.tls_ca", f"{path} must be a file with certificates in PEM ({_why(error)})"
        ) from None


def load_certificate(cert: Path, key: Path) -> Certificate:
    """Read a certificate and its key; raises what `ServerTls` raises."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    with _readable("run.tls_key", key), open(key, "rb", opener=regular_fd) as file:
        require_secret(key, os.fstat(file.fileno()))
    with _readable("run.tls_cert", cert), open(cert, "rb", opener=regular_fd):
        pass
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # else OpenSSL asks the terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "run.tls_cert",
            f"{cert} and run.tls_key {key} must be a certificate and its private key, in PEM and without a password "
            f"({_why(error)})",
        ) from None
    found = _seen(context, cert)
    names = tuple(str(name) for _, name in found.get("subjectAltName", ()))
    return Certificate(context, float(ssl.cert_time_to_seconds(str(found["notAfter"]))), names)


def problem_of_name(served: ssl.SSLContext, trusted: ssl.SSLContext, name: str) -> str:
    """Return why a client does not accept a server by a name or address; empty if it does. Opens no connection."""
    try:
        _shaken(served, trusted, name)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return _why(error)
    return ""


def _seen(context: ssl.SSLContext, cert: Path) -> dict[str, Any]:
    """Return a certificate as a client sees it that trusts it whatever its names and dates."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | _WHENEVER
    trusting.load_verify_locations(cert)
    try:
        return _shaken(context, trusting, None)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            "run.tls_cert", f"{cert} is no certificate of a server ({error.verify_message})"
        ) from None


def _shaken(served: ssl.SSLContext, trusted: ssl.SSLContext, name: str | None) -> dict[str, Any]:
    """Return the certificate of a server as a client sees it, after a handshake in memory. SSLError: it fails."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusted.wrap_bio(back, there, server_hostname=name)
    sides = [client, served.wrap_bio(there, back, server_side=True)]
    for _ in range(_ROUNDS):
        for side in list(sides):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                sides.remove(side)
        if not sides:
            break
    return dict(client.getpeercert() or {})


@contextlib.contextmanager
def _readable(key: str, path: Path) -> Iterator[None]:
    """Turn an error of the file within the block into one of a key."""
    try:
        yield
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read: {error.strerror or error}") from None


def _why(error: Exception) -> str:
    reason = str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
    # OpenSSL says no more of what it cannot read.
    return "cannot be decoded" if "PEM lib" in reason else printable(reason).lower().replace("_", " ")
