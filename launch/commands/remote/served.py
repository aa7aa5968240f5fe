"""Where an engine that serves a run of another host listens, and where others reach it."""

import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.bus.transport.mirror.engine_beats import own_host
from rolloutmq.bus.transport.mirror.place import host_of
from rolloutmq.bus.transport.mirror.run_copy import Accept
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.address import is_loopback
from rolloutmq.services.http_server.tls import load_certificate, problem_of_name

_PORT: Final = re.compile(r":([0-9]+)/?$")


@dataclass(frozen=True)
class Served:
    """Where an engine listens, by which host others reach it (empty: by the one that reaches the run), and its
    certificate.

    Raises:
        ConfigError: Others reach it, and that is not allowed; or it has a certificate without a key.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    insecure: bool = False
    has_tokens: bool = False
    """It asks for tokens: the run has keys."""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if not self.insecure and not self.has_tokens and not is_loopback(self.host):
            raise ConfigError(
                "--host",
                f"is within reach of other machines, and without --key the engine asks for no token (got "
                f"{self.host!r}); allow it with --insecure",
            )

        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert", "belongs to --tls-key: give both, or none")

    @property
    def is_clear(self) -> bool:
        """Whether tokens reach it from other machines without encryption."""
        return self.has_tokens and self.tls_cert is None and not is_loopback(self.host)

    def check(self, address: str, ca: str = "") -> None:
        """Require a certificate that clients accept, if there is one. Without it no worker could ask the engine.

        Args:
            address: Address at which this host reaches the broker.
            ca: What clients trust, in PEM; empty if it is not known, and not compared.

        Raises:
            ConfigError: It has ended, is of another authority, or does not name the host of the engine; or a file
                cannot be used.
            NotPrivateError: Others may read the key.
        """
        if self.tls_cert is None or self.tls_key is None:
            return
        found = load_certificate(self.tls_cert, self.tls_key)
        if found.ends <= (now := time.time()):
            raise ConfigError("--tls-cert", found.end(now))
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.load_verify_locations(None if ca else self.tls_cert, cadata=ca or None)
        if not ca:
            trusted.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        host = self._host(address).strip("[]")
        if problem := problem_of_name(found.context, trusted, host):
            raise ConfigError(
                "--tls-cert",
                f"workers reach the engine as {host}, and do not accept {self.tls_cert} ({problem}); it names "
                f"{', '.join(found.names) or 'no host'}: name this host in it, give --advertise one that it names, or "
                "sign it by the authority of the run (`rolloutmq keys tls`)",
            )

    def accepting(self, accept: Accept) -> Accept:
        """Return how a configuration is accepted with this address."""

        def accepted(data: bytes, layout: RunLayout) -> RunConfig:
            config = accept(data, layout)
            # A copy of the configuration names no keys; by these the run's own host knows that servers ask for tokens.
            allowed = self.insecure or self.has_tokens
            update = {"host": self.host, "port": self.port, "insecure": allowed}
            section = config.inference.model_copy(update=update)
            run = config.run.model_copy(update=self._certificate())
            return config.model_copy(update={"inference": section, "run": run})

        return accepted

    def _certificate(self) -> dict[str, Path | None]:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key}
        return {name: None if path is None else path.absolute() for name, path in files.items()}

    def url(self, own: str, address: str) -> str:
        """Return the URL for others.

        Args:
            own: That of this host.
            address: Address at which this host reaches the broker.
        """
        port = _PORT.search(own)
        scheme = own.partition("://")[0]
        return http_url(self._host(address), int(port[1]), scheme) if port else own

    def _host(self, address: str) -> str:
        return self.advertise or (own_host(host_of(address)) if self.host in {"0.0.0.0", "::"} else self.host)
