"""Weights by way of vLLM's own HTTP interface: for a server that is to have a copy, by the transfer that it defines.

    /pause?mode=keep   /start_weight_update   /update_weights   /finish_weight_update   /resume

Between pause and resume nothing is sampled, the prefix cache is emptied, and what is under way gets its keys and values
anew; vLLM stamps every token with the version that `/finish_weight_update` names. A transfer that fails in the middle
leaves the server paused: it answers nobody until a restore has sent the weights whole.

The tensors themselves go through a file with the names of transformers and the manifest beside them, which the server
proves before it loads anything (`services.inference.vllm.transfer`, registered in vLLM under `BACKEND`). vLLM's own
backends `ipc` and `nccl` need CUDA, and vLLM in the trainer; neither is used here.
"""

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec
from torch import Tensor, nn

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import WeightsMismatchError, WeightsNotSentError, WeightsTornError
from rolloutmq.trainer.weights.binding import manifest_of
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S, WRITE_PATIENCE_S
from rolloutmq.trainer.weights.manifest import WeightManifest, named_tensors
from rolloutmq.trainer.weights.parcel import parcel
from rolloutmq.trainer.weights.proof import digest
from rolloutmq.trainer.weights.share import Level, Proof

BACKEND: Final = "rolloutmq"
"""What vLLM is started with: `--weight-transfer-config '{"backend": "rolloutmq"}'`."""
MANIFEST: Final = "manifest"
"""Key of the manifest in the metadata of the file."""


class _Results(msgspec.Struct, frozen=True):
    """What vLLM says when methods of its workers were called: the answer of each."""

    results: list[dict[str, str]]


class SentWeights:
    """The weights of a trainer, sent to one vLLM. Make it by `create`. Belongs to one thread at a time."""

    def __init__(self, model: nn.Module, url: str, directory: Path, manifest: WeightManifest) -> None:
        self._model = model
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
    ) -> Self:
        """Send the weights of a model as `version`.

        Args:
            model: Its parameters stay its own.
            url: Of vLLM: `http://host:port`, or `unix:/path` of its socket.
            directory: Where files are left for vLLM to read; best in memory, such as /dev/shm.
            version: What the values are.
            tokenizer: Fingerprint of the model's tokenizer.

        Raises:
            WeightsMismatchError: The model has tensors that cannot be shared, or vLLM's model is another; names the
                first that differs, and vLLM goes on as it was.
            WeightsNotSentError: vLLM is away, or does not take them.
        """
        sent = cls(model, url, directory, manifest_of(model, fused=True, tokenizer=tokenizer))
        sent._require_match()
        sent._post("/init_weight_transfer_engine", {"init_info": {}})
        with sent.writing(version, restoring=True):
            pass
        return sent

    @property
    def version(self) -> PolicyVersion:
        """Version that vLLM has, or had before a transfer that failed."""
        return self._version

    def manifest(self) -> WeightManifest:
        """Return what the weights consist of."""
        return self._manifest

    def is_torn(self) -> bool:
        """Tell whether a write failed: in the block, and vLLM has the weights of before, or in the transfer, and it is
        paused since."""
        return self._torn

    @contextmanager
    def reading(self, patience_s: float = READ_PATIENCE_S) -> Iterator[PolicyVersion]:  # noqa: ARG002 - never waits
        """Yield the version that vLLM has.

        Raises:
            WeightsTornError: It has none that is whole.
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
        """Send the weights as `version` when the block has changed them.

        If the block raises, vLLM keeps the old ones, and the owner's count as half-written.

        Args:
            restoring: The weights are whole whatever was before, and so may follow a write that failed.
            patience_s: How long vLLM may take for each part.

        Raises:
            WeightsTornError: An earlier block or transfer failed and this is no restore.
            WeightsNotSentError: vLLM is away, or refuses them, or there is no room for the file; vLLM is paused if it
                lives and a transfer was begun.
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
                made.write(self._tensors(), metadata)
            except OSError as error:
                raise WeightsNotSentError(self._url, f"{made.path} could not be written: {error}") from error
            self._post("/pause?mode=keep", {}, patience_s)
            if restoring:
                self._close_failed(patience_s)
            self._post("/start_weight_update", {}, patience_s)
            self._post("/update_weights", {"update_info": {"path": str(made.path)}}, patience_s)
            self._post("/finish_weight_update", {"weight_version": label}, patience_s)
            self._post("/resume", {}, patience_s)
        self._torn, self._version = False, version

    def _close_failed(self, patience_s: float) -> None:
        """End a transfer that failed, if vLLM has one open: it would not begin another."""
        with suppress(WeightsNotSentError):  # there was none
            self._post("/finish_weight_update", {}, patience_s)

    def _tensors(self) -> dict[str, Tensor]:
        """Return each tensor under its first name; those that are tied go once."""
        found = dict(named_tensors(self._model))
        return {spec.name: found[spec.name].detach() for spec in self._manifest.tensors}

    def verify(self, level: Level, *, exact: bool = False) -> Proof:
        """Climb the ladder as far as a copy allows: there is no common memory, and so no alias and no nonce.

        Raises:
            WeightsMismatchError: A rung does not hold; names the tensor.
            WeightsNotSentError: vLLM is away.
        """
        if level > Level.DIGESTS:
            raise ValueError(
                "kernels of another kind give no equal logits: compare log-probabilities instead"
            )
        self._require_match()
        digests: dict[str, str] = {}
        if level >= Level.DIGESTS:
            digests = self._fused_digests(exact=exact)
            theirs = self._call("weight_digests", exact)
            for name in sorted(digests.keys() | theirs.keys()):
                left, right = digests.get(name, "nothing"), theirs.get(name, "nothing")
                if left != right:
                    raise WeightsMismatchError(name, f"holds {left} here, {right} there")
        return Proof(level, self._version, len(self._manifest.tensors), self._manifest.end, None, digests)

    def _require_match(self) -> None:
        said = self._call("match_weights", msgspec.json.encode(self._manifest).decode())
        if "tensor" in said:
            raise WeightsMismatchError(said["tensor"], said["problem"])

    def _call(self, method: str, *args: Any) -> dict[str, str]:
        """Call a method of the extension in vLLM."""
        said = self._post("/collective_rpc", {"method": method, "args": args})
        try:
            return msgspec.json.decode(said, type=_Results).results[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise WeightsNotSentError(
                self._url, f"{method} was answered by something else: {error}"
            ) from error

    def _fused_digests(self, *, exact: bool) -> dict[str, str]:
        tensors = {name: tensor.cpu() for name, tensor in self._tensors().items()}
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
        """Let go of the weights. What vLLM has it keeps."""

    def _post(self, path: str, body: Any, patience_s: float = WRITE_PATIENCE_S) -> bytes:
        connection = _connection(self._url, patience_s)
        try:
            connection.request("POST", path, msgspec.json.encode(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            said = response.read()
        except (OSError, http.client.HTTPException) as error:
            why = f"{path}: {type(error).__name__} {error}"
            raise WeightsNotSentError(self._url, why, away=True) from error
        finally:
            connection.close()
        if response.status != 200:
            text = " ".join(said[:500].decode(errors="replace").split())
            raise WeightsNotSentError(self._url, f"{path}: status {response.status}, {text}")
        return said


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a socket of this machine."""

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
