"""The key directory of a run: the broker's key pair, and the list of the keys that may enter.

`rolloutmq keys` changes it, one command at a time under a lock; the broker only reads it. Each change replaces the list
as a whole and is on disk before the command returns: a revoked key does not come back with a power cut.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import zmq

from rolloutmq.bus.files import PRIVATE_DIRECTORY
from rolloutmq.bus.transport.keys.key_files import read_secret, require_secret, write_secret
from rolloutmq.schemas.errors import ConfigError, MissingError, NotPrivateError, UnusablePathError
from rolloutmq.schemas.network.keys import KEYS_LIMIT, Bundle, KeyList, KeyRecord, Role, ServerKey
from rolloutmq.schemas.printable import shell_word
from rolloutmq.schemas.wire.envelope import Name

TOKEN_BYTES: Final = 32


@dataclass(frozen=True)
class KeyDirectory:
    """One directory of keys. All methods raise `MissingError`, `NotPrivateError`, `UnusablePathError` or `ConfigError`
    if it, or a file in it, is missing, open to others, unreadable or damaged."""

    path: Path

    @property
    def authorized(self) -> Path:
        """Path of the list of keys."""
        return self.path / "authorized.json"

    @classmethod
    def create(cls, path: Path) -> "KeyDirectory":
        """Create a directory with a new key pair of the broker, and no key of a client.

        Raises:
            ConfigError: It has keys already.
        """
        found = cls(path)
        with _usable(path):
            path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            found._require()
            public, secret = key_pair()
            try:
                write_secret(found._server, ServerKey(public=public, secret=secret), new=True)
            except FileExistsError:
                raise ConfigError(
                    str(path),
                    "has keys already; make one for a client with "
                    f"`rolloutmq keys new {shell_word(path)} NAME --role ROLE`",
                ) from None
            with contextlib.suppress(FileExistsError):
                write_secret(found.authorized, KeyList(), new=True)
        return found

    def server(self) -> ServerKey:
        """Return the broker's key pair."""
        self._require()
        return read_secret(self._server, ServerKey, self._remedy)

    def records(self) -> tuple[KeyRecord, ...]:
        """Return the keys in the order in which they were made, revoked ones included."""
        self._require()
        found = read_secret(self.authorized, KeyList, "restore it from a copy, or make new keys").keys
        if len({key.name for key in found}) < len(found) or len({key.public for key in found}) < len(found):
            raise ConfigError(str(self.authorized), "has a name or a public key twice; remove one of the two")
        return found

    def new(self, name: str, role: Role, *, ca: str = "") -> Bundle:
        """Make a key, and return what its client carries; nothing else keeps its secrets.

        Raises:
            ConfigError: The name is wrong, or was given before; also if there are too many keys.
        """
        try:
            msgspec.convert(name, Name)
        except msgspec.ValidationError:
            rule = "must be 1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or a digit"
            raise ConfigError("name", f"{rule} (got {name!r})") from None
        server = self.server()
        with self._locked():
            known = self.records()
            taken = next((key for key in known if key.name == name), None)
            if taken is not None:
                state = "was revoked" if taken.revoked is not None else "is in use"
                raise ConfigError(
                    "name",
                    f"a key of this name {state}, and names are not given twice (got {name}); choose another",
                )
            if len(known) >= KEYS_LIMIT:
                raise ConfigError(
                    str(self.authorized), f"has {KEYS_LIMIT} keys, the limit; begin another directory"
                )
            public, secret = key_pair()
            token = secrets.token_urlsafe(TOKEN_BYTES)
            record = KeyRecord(
                name=name, role=role, public=public, token=hash_of_token(token), created=time.time()
            )
            self._write((*known, record))
        return Bundle(
            name=name, role=role, public=public, secret=secret, server=server.public, token=token, ca=ca
        )

    def revoke(self, name: str) -> KeyRecord:
        """Revoke a key; revoking it again changes nothing. Return its record.

        Raises:
            ConfigError: There is no key of this name.
        """
        with self._locked():
            known = self.records()
            found = next((key for key in known if key.name == name), None)
            if found is None:
                names = ", ".join(key.name for key in known[:20]) or "none"
                raise ConfigError("name", f"there is no key of this name (got {name}; keys: {names})")
            if found.revoked is not None:
                return found
            revoked = msgspec.structs.replace(found, revoked=time.time())
            self._write(tuple(revoked if key.name == name else key for key in known))
        return revoked

    @property
    def _server(self) -> Path:
        return self.path / "server.key"

    @property
    def _remedy(self) -> str:
        return f"make keys with `rolloutmq keys init {shell_word(self.path)}`"

    def _require(self) -> None:
        """Require a directory that this user alone may use."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError(str(self.path), self._remedy) from None
        except OSError as error:
            raise UnusablePathError(str(self.path), error.strerror or str(error)) from error
        if not stat.S_ISDIR(found.st_mode):
            raise NotPrivateError(str(self.path), "is no directory", self._remedy)
        require_secret(self.path, found)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other commands from changing the list within the block; waits for them."""
        self._require()
        with _usable(self.path):
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)

    def _write(self, keys: tuple[KeyRecord, ...]) -> None:
        with _usable(self.path):
            write_secret(self.authorized, KeyList(keys=keys))


def key_pair() -> tuple[str, str]:
    """Return a new public and secret key.

    Raises:
        MissingError: The ZeroMQ of this machine was built without CURVE.
    """
    if not zmq.has("curve"):
        raise MissingError("CURVE in this build of libzmq", "install pyzmq from its wheel: pip install pyzmq")
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def hash_of_token(token: str) -> str:
    """Return the hash of a token, as in the list of keys. A token has 256 random bits, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Turn a refusal of the file system within the block into an error that names the directory."""
    try:
        yield
    except OSError as error:
        raise UnusablePathError(f"key directory {path}", error.strerror or str(error)) from error
