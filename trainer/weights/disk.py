"""Weights by way of a directory: for a server that shares no memory with the trainer, only a file system.

A reader has a copy of its own: when it enters `reading` and the address names another version, it reads that one whole,
proves it, and only then copies it in, so that it has the old weights or the new ones, never a mixture; the version that
`reading` yields is the one that it copied. A write that fails publishes nothing, and the owner refuses the next one
until it restores. How versions lie on the disk, and when they go, is `versions`' matter.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import WeightsDamagedError, WeightsMismatchError, WeightsTornError
from rolloutmq.trainer.weights import versions
from rolloutmq.trainer.weights.address import directory_of, own
from rolloutmq.trainer.weights.binding import adopt, manifest_of, prove
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S, WRITE_PATIENCE_S
from rolloutmq.trainer.weights.manifest import WeightManifest, named_tensors
from rolloutmq.trainer.weights.proof import logits_digest, tensor_digests
from rolloutmq.trainer.weights.share import Level, Proof


class DiskShare:
    """One side of weights that are published as files. Make it by `create` or `attach`."""

    def __init__(self, model: nn.Module, address_file: Path, manifest: WeightManifest, *, run: str) -> None:
        self._model = model
        self._address_file = address_file
        self._manifest = manifest
        self._run = run
        """Of the owner's life; for a reader, of the version that it has."""
        self._tokenizer = ""
        self._version = PolicyVersion()
        self._torn = False
        self._directory = ""
        """Of the version that this side has."""
        self._writes = 0
        self._lock: int | None = None
        self._seen: tuple[int, int] | None = None
        """Inode and time of the address file that was read last."""
        self._refused = False

    @classmethod
    def create(
        cls,
        model: nn.Module,
        address_file: Path,
        *,
        version: PolicyVersion = PolicyVersion(),
        tokenizer: str = "",
    ) -> Self:
        """Publish the weights of a model as `version`; what earlier owners left is kept as long as any old version.

        Raises:
            SegmentInUseError: A living process publishes there.
            WeightsMismatchError: The model has tensors that cannot be shared.
        """
        manifest = manifest_of(model, tokenizer=tokenizer)
        share = cls(model, address_file, manifest, run=secrets.token_hex(8))
        share._tokenizer = tokenizer
        share._lock = own(directory_of(address_file))
        try:
            with share.writing(version, restoring=True):
                pass
        except BaseException:
            share.close()
            raise
        return share

    @classmethod
    def attach(cls, model: nn.Module, address_file: Path, *, tokenizer: str = "") -> Self:
        """Fill a model, on meta or built, with the newest version.

        Raises:
            SegmentGoneError: Nothing was published yet.
            WeightsDamagedError: The files of the newest version are not what was published, or cannot be read.
            WeightsMismatchError: The model means other tensors; names the first that differs. It is unchanged.
        """
        seen = versions.seen(address_file)
        with versions.newest(address_file) as found:
            # A model that kept the file mapped would keep the disk's room for as long as the reader lives.
            tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
        computed = prove(model, found.manifest, tokenizer)
        adopt(model, found.manifest, tensors, computed)
        share = cls(model, address_file, found.manifest, run=found.address.run)
        share._tokenizer, share._version, share._seen = tokenizer, found.address.version, seen
        share._directory = found.address.directory
        return share

    @property
    def version(self) -> PolicyVersion:
        """Version that this side has."""
        return self._version

    def manifest(self) -> WeightManifest:
        """Return what the weights consist of."""
        return self._manifest

    def is_torn(self) -> bool:
        """Tell whether a write of this owner failed in the middle; of a reader, whether it refused the newest version.

        What a reader has is whole.
        """
        return self._torn or self._refused

    def is_replaced(self) -> bool:
        """Tell whether the newest version is of another life than the one that this side has. Reads the file.

        As long as the file cannot be read it counts as the one that it was; `reading` says what is wrong.
        """
        try:
            address = versions.named(self._address_file)
        except WeightsDamagedError:
            return False
        return address is not None and address.run != self._run

    @contextmanager
    def reading(self, patience_s: float = READ_PATIENCE_S) -> Iterator[PolicyVersion]:  # noqa: ARG002 - never waits
        """Take over a newer version if there is one, and yield the version that this side has.

        Raises:
            SegmentGoneError: Versions were removed faster than they could be read.
            WeightsDamagedError: The files of the newest version are not what was published, or cannot be read; the old
                one stays.
            WeightsMismatchError: The newer version is of another model; the old one stays.
            WeightsTornError: This owner's own write failed in the middle.
        """
        if self._torn:
            raise WeightsTornError(self._version)
        self._refresh()
        yield self._version

    def keeping(self) -> AbstractContextManager[None]:
        """Nothing is held by a reading."""
        return nullcontext()

    def _refresh(self) -> None:
        try:
            seen = versions.seen(self._address_file)
            if seen is not None and seen != self._seen:
                self._look()
                self._seen = seen
        except WeightsDamagedError:
            self._refused = True
            raise
        self._refused = False

    def _look(self) -> None:
        address = versions.named(self._address_file)
        if address is not None and address.directory != self._directory:
            with versions.newest(self._address_file) as found:
                self._take(found)

    def _take(self, found: versions.Found) -> None:
        if found.manifest != self._manifest:
            prove(self._model, found.manifest, self._tokenizer)
        mine = dict(named_tensors(self._model))
        with torch.no_grad():
            for name, tensor in found.tensors.items():
                mine[name].copy_(tensor)
        self._manifest, self._version = found.manifest, found.address.version
        self._directory, self._run = found.address.directory, found.address.run

    @contextmanager
    def writing(
        self,
        version: PolicyVersion,
        *,
        restoring: bool = False,
        patience_s: float = WRITE_PATIENCE_S,  # noqa: ARG002 - nobody is waited for
    ) -> Iterator[None]:
        """Let the block change the weights, then publish them as `version`; blocks for as long as the disk takes.

        Raises:
            WeightsTornError: An earlier block failed and this one is no restore.
            WeightsNotWrittenError: There is no room, or the disk failed; the owner must restore.
        """
        if self._torn and not restoring:
            raise WeightsTornError(self._version)
        self._torn = True
        yield
        self._publish(version)
        self._torn, self._version = False, version

    def _publish(self, version: PolicyVersion) -> None:
        self._writes += 1
        name = f"{version.incarnation}.{version.step}.{self._run}-{self._writes}"
        own = dict(named_tensors(self._model))
        tensors = {spec.name: own[spec.name].detach() for spec in self._manifest.tensors}
        versions.publish(self._address_file, name, version, self._run, self._manifest, tensors)
        self._directory = name

    def verify(
        self,
        level: Level,
        *,
        inputs: Tensor | None = None,
        patience_s: float = 0.0,  # noqa: ARG002 - nobody is asked
        exact: bool = False,
    ) -> Proof:
        """Climb the ladder to `level`; see `SharedWeights.verify`.

        Without shared memory there is no aliasing to prove and nobody to ask: in their place stands that the files
        of the version which this side has hold the very bytes of the model.
        """
        prove(self._model, self._manifest, self._tokenizer)
        digests, logits = dict[str, str](), ""
        with self.reading() as version:
            if level >= Level.ALIASING:
                self._require_published()
            if level >= Level.DIGESTS:
                digests = tensor_digests(self._model, self._manifest, exact=exact)
            if level >= Level.LOGITS:
                if inputs is None:
                    raise ValueError("LOGITS needs inputs")
                logits = logits_digest(self._model, inputs)
        manifest = self._manifest
        return Proof(level, version, len(manifest.tensors), manifest.end, None, digests, logits)

    def _require_published(self) -> None:
        mine = dict(named_tensors(self._model))
        with versions.newest(self._address_file) as found:
            if found.address.directory != self._directory:
                return  # a newer one was published this moment; the bytes of this one may be gone
            for name, tensor in found.tensors.items():
                if not torch.equal(mine[name].detach().cpu(), tensor):
                    raise WeightsMismatchError(name, "differs from the file of this version")

    def close(self, *, unlink: bool = False) -> None:
        """Let go of the weights; with `unlink`, remove the address file and every version. May be called twice."""
        if unlink and not self.is_replaced():
            self._address_file.unlink(missing_ok=True)
            shutil.rmtree(directory_of(self._address_file), ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
