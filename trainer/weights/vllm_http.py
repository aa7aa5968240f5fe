"""Weight transfer to vLLM through its HTTP interface: the copy that `backend = "vllm_http"` gives to a run's vLLM.

    trainer: model/, weights.json (sender)  ->  engine: starts vLLM, vllm.json (its address)
        ->  trainer: transfers the weights  ->  engine: serves;  then a transfer per step, when `writing` ends

A transfer is this sequence of requests:

    /pause?mode=keep   /start_weight_update   /update_weights   /finish_weight_update   /resume

Between pause and resume vLLM samples nothing, drops its prefix cache, and recomputes keys and values of running
requests; it stamps every token with the version given to `/finish_weight_update`. A transfer that fails midway leaves
vLLM paused until a restore has transferred the weights whole.

The tensors go through a safetensors file with the names of transformers and the manifest, which vLLM verifies before it
loads (`services.inference.vllm.weight_transfer`, registered in vLLM under `BACKEND`). The file is written in place
(`trainer.files.safetensors`), because a rename would lose the lock on it. It goes from any device to any device, and to
each of several workers. vLLM's own backends are not used: `ipc` sends pickles, and `nccl` needs vLLM in the trainer's
environment.

If vLLM dies or refuses a step, the trainer's step stands. Before the next pull, `supply` waits for a vLLM and transfers
the weights whole. The trainer ends if vLLM has another model, or lives and refuses the weights several times in a row.
The reason of a wait is in the address file, for `rolloutmq status`, and now and then in the log.
"""

import fcntl
import http.client
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import astuple
from torch import Tensor, nn

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import FILE_POLL_S, read_json, write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.schemas.errors import (
    SegmentInUseError,
    WeightsMismatchError,
    WeightsNotSentError,
    WeightsTornError,
)
from rolloutmq.schemas.files import SentAddress, VllmAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.files import safetensors as safetensors_file
from rolloutmq.trainer.weights import address
from rolloutmq.trainer.weights.address import PARCEL
from rolloutmq.trainer.weights.layout import TensorSpec
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S, WRITE_PATIENCE_S
from rolloutmq.trainer.weights.manifest import WeightManifest, arriving, named_tensors
from rolloutmq.trainer.weights.model.binding import manifest_of
from rolloutmq.trainer.weights.share import Level, Proof, Source
from rolloutmq.trainer.weights.verify import digest


class SafetensorsFile(NamedTuple):
    """A private file, locked like a segment, so that the sweep finds the file of a dead trainer."""

    path: Path
    fd: int

    def write(
        self,
        described: Iterable[TensorSpec],
        tensors: Iterable[tuple[TensorSpec, Tensor]],
        metadata: Mapping[str, str],
    ) -> None:
        """Fill the file, see `trainer.files.safetensors`. Blocks while writing.

        Raises:
            OSError: There is no space.
        """
        with os.fdopen(self.fd, "wb", closefd=False) as file:
            safetensors_file.write(file, described, tensors, metadata)


@contextmanager
def parcel(directory: Path) -> Iterator[SafetensorsFile]:
    """Make an empty transfer file, locked for the duration of the block and removed afterwards."""
    path = directory / f"{segment_file.PREFIX}{secrets.token_hex(8)}-{PARCEL}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        segment_file.lock_byte(fd, 0, fcntl.F_RDLCK)
        yield SafetensorsFile(path, fd)
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


BACKEND: Final = "rolloutmq"
"""Name in vLLM's option `--weight-transfer-config '{"backend": "rolloutmq"}'`."""

MANIFEST: Final = "manifest"
"""Key of the manifest in the metadata of the file."""


class _Results(msgspec.Struct, frozen=True):
    """Response of vLLM to a worker method: one result per worker."""

    results: list[dict[str, str]]


class SentWeights:
    """The weights of a trainer, transferred to one vLLM. Make it by `create`. Belongs to one thread at a time."""

    def __init__(self, source: Source, url: str, directory: Path, manifest: WeightManifest) -> None:
        self._source = source
        self._url = url
        self._directory = directory
        self._manifest = manifest
        self._version = PolicyVersion()
        self._torn = False

    @classmethod
    def create(
        cls,
        model: nn.Module,
        url: str,
        directory: Path,
        *,
        version: PolicyVersion = PolicyVersion(),
        tokenizer: str = "",
        source: Source | None = None,
    ) -> Self:
        """Transfer the weights of a model as `version`.

        Args:
            model: Keeps its own parameters.
            source: Tensors to transfer instead of the model's, see `Source`.
            url: Address of vLLM: `http://host:port`, or `unix:/path` of its socket.
            directory: Directory for transfer files; best in memory, such as /dev/shm.
            version: Version of the values.
            tokenizer: Fingerprint of the model's tokenizer.

        Raises:
            WeightsMismatchError: The model cannot be shared, or vLLM has another; names the first tensor that differs.
                vLLM is unchanged.
            WeightsNotSentError: vLLM is unavailable, or refuses the weights.
        """
        manifest = manifest_of(model, fused=True, tokenizer=tokenizer)
        sent = cls(source or (lambda: named_tensors(model)), url, directory, manifest)
        sent._require_match()
        sent._post("/init_weight_transfer_engine", {"init_info": {}})
        with sent.writing(version, restoring=True):
            pass
        return sent

    @property
    def version(self) -> PolicyVersion:
        """Version in vLLM, or the one before a failed transfer."""
        return self._version

    def manifest(self) -> WeightManifest:
        """Return the manifest of the weights."""
        return self._manifest

    def is_torn(self) -> bool:
        """Return whether a write failed: in the block (vLLM keeps the old weights), or in the transfer (vLLM stays
        paused).
        """
        return self._torn

    @contextmanager
    def reading(self, patience_s: float = READ_PATIENCE_S) -> Iterator[PolicyVersion]:  # noqa: ARG002 - never waits
        """Yield the version in vLLM.

        Raises:
            WeightsTornError: It has no complete version.
        """
        if self._torn:
            raise WeightsTornError(self._version)
        yield self._version

    @contextmanager
    def writing(
        self,
        version: PolicyVersion,
        *,
        restoring: bool = False,
        patience_s: float = WRITE_PATIENCE_S,
    ) -> Iterator[None]:
        """Transfer the weights as `version` after the block has changed them.

        If the block raises, vLLM keeps the old ones, and the owner's count as half-written.

        Args:
            restoring: The weights are whole in any case, and so may follow a failed write.
            patience_s: Time limit of each request, in seconds.

        Raises:
            WeightsTornError: An earlier block or transfer failed and this one does not restore.
            WeightsNotSentError: vLLM is unavailable, or refuses the weights, or there is no space for the file. vLLM
                stays paused if the transfer had begun.
        """
        if self._torn and not restoring:
            raise WeightsTornError(self._version)
        self._torn = True
        yield
        self._send(version, patience_s, restoring=restoring)

    def _send(self, version: PolicyVersion, patience_s: float, *, restoring: bool) -> None:
        label = f"{version.incarnation}.{version.step}"
        metadata = {MANIFEST: msgspec.json.encode(self._manifest).decode()}
        with parcel(self._directory) as made:
            try:
                made.write(self._manifest.tensors, self._tensors(), metadata)
            except OSError as error:
                raise WeightsNotSentError(self._url, f"{made.path} could not be written: {error}") from error
            self._post("/pause?mode=keep", {}, patience_s)
            if restoring:
                self._call("end_update")
            self._post("/start_weight_update", {}, patience_s)
            self._post("/update_weights", {"update_info": {"path": str(made.path)}}, patience_s)
            self._require_taken()
            self._post("/finish_weight_update", {"weight_version": label}, patience_s)
            self._require_taken()
            self._post("/resume", {}, patience_s)
        self._torn, self._version = False, version

    def _require_taken(self) -> None:
        """Check that no worker of vLLM has failed to take the weights."""
        for worker in self._call("update_problem"):
            if problem := worker.get("problem"):
                raise WeightsNotSentError(self._url, problem)

    def _tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yield each tensor once; what is tied is transferred once."""
        return arriving(self._manifest, self._source())

    def verify(self, level: Level, *, exact: bool = False) -> Proof:
        """Verify as far as a copy allows: without shared memory there is no aliasing and no nonce.

        Raises:
            WeightsMismatchError: A level does not hold; names the tensor.
            WeightsNotSentError: vLLM is unavailable.
        """
        if level > Level.DIGESTS:
            raise ValueError(
                "level: other kernels give other logits; compare log-probabilities instead of LOGITS"
            )
        self._require_match()
        digests: dict[str, str] = {}
        if level >= Level.DIGESTS:
            digests = self._fused_digests(exact=exact)
            theirs, *others = self._call("weight_digests", exact)
            if others:
                raise ValueError(
                    "level: each worker of vLLM has a part of the weights; compare log-probabilities"
                )
            for name in sorted(digests.keys() | theirs.keys()):
                left, right = digests.get(name, "nothing"), theirs.get(name, "nothing")
                if left != right:
                    raise WeightsMismatchError(name, f"holds {left} here, {right} there")
        return Proof(level, self._version, len(self._manifest.tensors), self._manifest.end, None, digests)

    def _require_match(self) -> None:
        for difference in self._call("match_weights", msgspec.json.encode(self._manifest).decode()):
            if "tensor" in difference:
                raise WeightsMismatchError(difference["tensor"], difference["problem"])

    def _call(self, method: str, *args: Any) -> list[dict[str, str]]:
        """Call a method of the extension in each worker of vLLM, of which there is one at least."""
        reply = self._post("/collective_rpc", {"method": method, "args": args})
        try:
            if results := msgspec.json.decode(reply, type=_Results).results:
                return results
            why = "no results"
        except msgspec.DecodeError as error:
            why = str(error)
        raise WeightsNotSentError(self._url, f"malformed response to {method}: {why}")

    def _fused_digests(self, *, exact: bool) -> dict[str, str]:
        tensors = {spec.name: tensor.detach().cpu() for spec, tensor in self._tensors()}
        found = {}
        for spec in self._manifest.fused:
            whole = next(iter(tensors.values())).new_zeros(spec.shape, dtype=tensors[spec.parts[0]].dtype)
            start = 0
            for part in spec.parts:
                rows = tensors[part].shape[0]
                whole[start : start + rows] = tensors[part]
                start += rows
            found[spec.name] = digest(whole, exact=exact)
        return found

    def close(self, *, unlink: bool = False) -> None:
        """Release the weights. vLLM keeps its copy."""

    def _post(self, path: str, body: Any, patience_s: float = WRITE_PATIENCE_S) -> bytes:
        connection = _connection(self._url, patience_s)
        try:
            connection.request("POST", path, msgspec.json.encode(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply = response.read()
        except (OSError, http.client.HTTPException) as error:
            why = f"{path}: {type(error).__name__} {error}"
            raise WeightsNotSentError(self._url, why, away=True) from error
        finally:
            connection.close()
        if response.status != 200:
            text = " ".join(reply[:500].decode(errors="replace").split())
            raise WeightsNotSentError(self._url, f"{path}: status {response.status}, {text}")
        return reply


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("vllm", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(url: str, patience_s: float) -> http.client.HTTPConnection:
    where = urlsplit(url)
    if where.scheme == "unix":
        return _UnixConnection(where.path, patience_s)
    return http.client.HTTPConnection(where.hostname or "", where.port, timeout=patience_s)


logger = logging.getLogger(__name__)


REFUSALS: Final = 5
"""Refusals in a row, by a live vLLM, after which the trainer ends; a passing shortage is over by then."""

PAUSE_S: Final = 1.0
"""Seconds between two attempts after a refusal."""


class VllmSender:
    """Transfers a trainer's weights to the run's vLLM. Make it by `create`. Belongs to one thread."""

    def __init__(
        self,
        model: nn.Module,
        address_file: Path,
        vllm_file: Path,
        version: PolicyVersion,
        tokenizer: str,
        source: Source | None = None,
    ) -> None:
        self.version = version
        """Version of the model."""
        self._model = model
        self._address_file = address_file
        self._vllm_file = vllm_file
        self._tokenizer = tokenizer
        self._source = source
        self._sent: SentWeights | None = None
        """None while no vLLM has the weights."""
        self._nonce = ""
        """Nonce of the vLLM that has the weights."""
        self._waits = ""
        """Why no vLLM has the weights."""
        self._refrain = LogThrottle()

    @classmethod
    def create(
        cls,
        model: nn.Module,
        address_file: Path,
        vllm_file: Path,
        *,
        version: PolicyVersion = PolicyVersion(),
        tokenizer: str = "",
        source: Source | None = None,
    ) -> "VllmSender":
        """Publish this trainer as the sender; nothing is transferred yet, see `supply`.

        Args:
            model: Keeps its own parameters.
            address_file: `weights.json` of the run.
            vllm_file: `vllm.json` of the run.
            version: Version of the values.
            tokenizer: Fingerprint of the model's tokenizer.
            source: Tensors to transfer instead of the model's, see `Source`; also called by `supply`.

        Raises:
            SegmentInUseError: A live process is the sender.
        """
        found = address.read_sent(address_file)
        me = segment_file.SegmentOwner.current()
        if found is not None and found.sender != me and address.owner_lives(address_file):
            raise SegmentInUseError(str(address_file), found.sender[0])
        address.sweep(address_file)
        made = cls(model, address_file, vllm_file, version, tokenizer, source)
        made._publish()
        return made

    @contextmanager
    def writing(self, version: PolicyVersion, /) -> Iterator[None]:
        """Transfer the weights as `version` after the block has changed them.

        If vLLM does not take them, `supply` repeats the transfer. Blocks during the transfer.
        """
        if self._sent is None:
            yield
            self.version = version
            return
        try:
            with self._sent.writing(version):
                yield
                self.version = version
        except WeightsNotSentError as error:
            logger.warning("weights not sent version=%d.%d error=%s", *astuple(version), error)
            self._sent = None
        self._publish()

    def supply(self, wait_s: float = math.inf) -> bool:
        """Wait until the run's vLLM has the weights; transfer them if needed. KeyboardInterrupt ends the wait.

        Args:
            wait_s: Longest time to wait for an unavailable vLLM, in seconds.

        Returns:
            Whether vLLM has the weights.

        Raises:
            WeightsMismatchError: vLLM has another model; names the first tensor that differs.
            WeightsNotSentError: vLLM lives and has refused the weights several times.
        """
        refused, until = 0, time.monotonic() + wait_s
        while not self._is_supplied():
            if not refused and time.monotonic() > until:
                return False
            found = read_json(self._vllm_file, VllmAddress)
            if found is None:
                self._wait(f"no vLLM has published its address in {self._vllm_file.name}", FILE_POLL_S)
                continue
            try:
                self._send_whole(found)
            except WeightsNotSentError as error:
                self._sent = None
                refused = 0 if error.away else refused + 1
                if refused == REFUSALS:
                    raise
                why = f"refused {refused} times, {error}" if refused else str(error)
                self._wait(why, PAUSE_S if refused else FILE_POLL_S)
        return True

    def _wait(self, why: str, pause_s: float) -> None:
        """Pause, and report the reason."""
        if self._refrain.is_due(why, time.monotonic()):
            logger.warning("waiting for=vllm version=%d.%d why=%s", *astuple(self.version), why)
        if why != self._waits:
            self._waits = why
            self._publish()
        time.sleep(pause_s)

    def _is_supplied(self) -> bool:
        """Return whether the run's current vLLM has the weights. Reads a file."""
        if self._sent is None:
            return False
        found = read_json(self._vllm_file, VllmAddress)
        return found is not None and found.nonce == self._nonce

    def _send_whole(self, found: VllmAddress) -> None:
        self._sent = SentWeights.create(
            self._model,
            found.url,
            segment_file.SHM,
            version=self.version,
            tokenizer=self._tokenizer,
            source=self._source,
        )
        self._nonce, self._waits = found.nonce, ""
        self._refrain = LogThrottle()
        logger.info("weights sent to=%s version=%d.%d", found.url, *astuple(self.version))
        self._publish()

    def _publish(self) -> None:
        """Publish the sender, the version in vLLM, and the reason of a wait."""
        arrived = self.version if self._sent else None
        me = segment_file.SegmentOwner.current()
        write_json(self._address_file, SentAddress(sender=me, version=arrived, waits=self._waits))

    def close(self, *, unlink: bool = False) -> None:
        """Release the weights; with `unlink`, remove the address file. vLLM keeps its copy."""
        if unlink:
            self._address_file.unlink(missing_ok=True)
