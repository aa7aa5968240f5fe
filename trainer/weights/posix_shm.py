"""Weights in shared memory: one copy for trainer and server, in a file in /dev/shm that both map.

    control page | scratch page | tensors | manifest

The control page has the segment's header (`bus.shm.segment_file`) and the fields of `lock`; the scratch page is that of
`verify`.

The owner (trainer) copies the weights of its model there and binds the model's parameters to them, so that in-place
changes under `writing` reach all readers. A reader binds a model built on meta to the same bytes, mapped read-only: a
stray write crashes the reader and never changes the policy. Attaching fails closed, see `manifest`; nothing is copied,
converted or left on meta.

The values of the owner's model win: `create_or_adopt` writes them all, whether the segment is new or left by a killed
owner, perhaps mid-write. Make the optimizer afterwards: the parameters are new objects. One share belongs to one thread
at a time.
"""

import logging
import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final, Protocol, Self

import msgspec
import torch
from torch import Tensor, nn

from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentFile
from rolloutmq.schemas.errors import (
    SegmentGoneError,
    SegmentInUseError,
    WeightsBusyError,
    WeightsMismatchError,
)
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.layout import PhysicalTensor, TensorSpec, align
from rolloutmq.trainer.weights.lock import (
    PAGE_BYTES,
    READ_PATIENCE_S,
    TENSORS_AT,
    WRITE_PATIENCE_S,
    WeightLock,
)
from rolloutmq.trainer.weights.manifest import MANIFEST_LIMIT_BYTES, WeightManifest, arriving
from rolloutmq.trainer.weights.model.binding import adopt, bind, manifest_of, prove
from rolloutmq.trainer.weights.share import Level, Proof, Source, require_own_tensors
from rolloutmq.trainer.weights.verify import (
    Scratch,
    logits_digest,
    require_aliases,
    tensor_digests,
)


def view(flat: Tensor, spec: TensorSpec | PhysicalTensor) -> Tensor:
    """Return a tensor of the manifest on the shared bytes, on their storage but not a view for autograd.

    Views of one base share its version counter, so changing one would invalidate the graph of all.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    stride = spec.stride if isinstance(spec, TensorSpec) else torch.empty(spec.shape, device="meta").stride()
    made = torch.empty(0, dtype=dtype, device=flat.device)
    if not spec.nbytes:
        return made.reshape(spec.shape)
    first = flat.storage_offset() + spec.offset
    # `set_` would enlarge a storage that is too small, outside of the shared memory.
    if (first % dtype.itemsize) or spec.offset + spec.nbytes > flat.numel():
        raise WeightsMismatchError(spec.name, f"lies at {spec.offset}: outside the shared memory")
    return made.set_(flat.untyped_storage(), first // dtype.itemsize, spec.shape, stride)


def mapped(segment: SegmentFile) -> mmap.mmap:
    """Map a new segment for writing; remove it if that fails."""
    try:
        return mmap.mmap(segment.fd, 0)
    except BaseException:
        segment.discard()
        raise


def open_left(address_file: Path) -> SegmentFile | None:
    """Open the segment in the address file if its owner is dead.

    Raises:
        SegmentInUseError: The owner lives.
    """
    address = segment_file.read_address(address_file)
    if address is None:
        return None
    try:
        left = segment_file.open_existing(Path(address.path), address.nonce, writable=True)
    except SegmentGoneError:
        return None
    owner = left.owner()
    if owner is not None and owner.alive():
        os.close(left.fd)
        raise SegmentInUseError(address.path, owner.pid)
    return left


class Readable(Protocol):
    """A share whose weights can be held still."""

    def _begin_reading(self, patience_s: float) -> PolicyVersion: ...

    def _end_reading(self) -> None: ...


class Reading:
    """Holds the weights still for the duration of the block. A generator would take twice as long."""

    __slots__ = ("_patience_s", "_share")

    def __init__(self, share: Readable, patience_s: float) -> None:
        self._share = share
        self._patience_s = patience_s

    def __enter__(self) -> PolicyVersion:
        return self._share._begin_reading(self._patience_s)

    def __exit__(self, *_error: object) -> None:
        self._share._end_reading()


logger = logging.getLogger(__name__)


ANSWER_PATIENCE_S: Final = 10.0
"""Seconds to wait for the other side, which answers with its next step."""

ADOPT_PATIENCE_S: Final = 10.0
"""Seconds to wait for readers of a segment to adopt. A reader holds the lock for one forward pass. A slow one attaches
to a new segment later; a stopped one would block every restart of the trainer.
"""


class WeightShare:
    """The weights of one segment, bound to one model. Make it by `create_or_adopt` or `attach`."""

    KIND: ClassVar = "weights"
    """Part of the segment's name."""

    def __init__(
        self,
        segment: SegmentFile,
        memory: mmap.mmap,
        address_file: Path,
        *,
        owner: bool,
        adopted: bool = False,
    ) -> None:
        self._segment = segment
        self._memory: mmap.mmap | None = memory
        self._lock = WeightLock(memory, segment.fd)
        self._address_file = address_file
        self._owner = owner
        self._scratch: Scratch | None = None
        with suppress(OSError, ValueError):
            self._scratch = Scratch(segment.path, os.fstat(segment.fd).st_ino, owner=owner)
        self._model: nn.Module | None = None
        self._source: Source | None = None
        self._flat: Tensor | None = None
        """All tensors as bytes, from offset 0."""
        self._tokenizer = ""
        self.adopted = adopted
        """Whether the segment was left by an earlier owner."""

    @classmethod
    def create_or_adopt(
        cls,
        model: nn.Module,
        address_file: Path,
        *,
        version: PolicyVersion = PolicyVersion(),
        fused: bool = False,
        tokenizer: str = "",
        source: Source | None = None,
    ) -> Self:
        """Share the weights of a model and publish the address; adopt the segment of a killed owner if it fits.

        Attached readers of an adopted segment stay attached and see the new values under the new version. If one of
        them holds its lock longer than `ADOPT_PATIENCE_S`, a new segment is made, and all readers attach again.

        Args:
            model: Its values become the shared ones, and its parameters views of them.
            version: Version of the values.
            fused: Lay the tensors out for a server with fused projections, see `layout`.
            tokenizer: Fingerprint of the model's tokenizer, see `fingerprint`.
            source: Tensors to share instead of the model's, see `Source`; the model is unchanged. Each write copies
                them, and readers wait meanwhile.

        Raises:
            SegmentInUseError: A live process owns the segment in the address file.
            WeightsMismatchError: The model has tensors that cannot be shared.
            MissingError: There is not enough shared memory.
        """
        manifest = manifest_of(model, fused=fused, tokenizer=tokenizer)
        manifest = msgspec.structs.replace(manifest, base=cls._base())
        left = open_left(address_file)
        heir = cls._adopt(left, manifest, address_file) if left else None
        if heir is not None:
            try:
                heir._give(model, manifest, version, tokenizer, source, ADOPT_PATIENCE_S)
            except WeightsBusyError as error:
                logger.warning("segment not adopted path=%s reason=%s", heir.path, str(error))
            else:
                return heir
        share = cls._create(manifest, address_file, model)
        share._give(model, manifest, version, tokenizer, source, WRITE_PATIENCE_S)
        if left:
            left.path.unlink(missing_ok=True)
        return share

    def _give(
        self,
        model: nn.Module,
        manifest: WeightManifest,
        version: PolicyVersion,
        tokenizer: str,
        source: Source | None,
        patience_s: float,
    ) -> None:
        """Copy the weights here and publish the address; on failure, close."""
        self._source = source
        try:
            with self.writing(version, restoring=True, patience_s=patience_s), torch.no_grad():
                if source is None:
                    bind(model, manifest, self._views(manifest), keep=True)
            self._model, self._tokenizer = model, tokenizer
            segment_file.write_address(self._address_file, self._segment)
        except BaseException:
            self.close(unlink=not self.adopted)
            raise

    @classmethod
    def _base(cls) -> int:
        return TENSORS_AT

    @classmethod
    def _create(cls, manifest: WeightManifest, address_file: Path, _model: nn.Module) -> Self:
        encoded = msgspec.json.encode(manifest)
        offset = manifest.base + align(manifest.end)
        segment = segment_file.create(cls.KIND, offset + len(encoded))
        memory = mapped(segment)
        memory[offset:] = encoded
        share = cls(segment, memory, address_file, owner=True)
        share._lock.place_manifest(offset, len(encoded))
        share._flat = share._open_flat(manifest)
        return share

    @classmethod
    def _adopt(cls, left: SegmentFile, manifest: WeightManifest, address_file: Path, /) -> Self | None:
        """Take over the segment of a dead owner; close it and return None if it belongs to another model."""
        try:
            share = cls(left, mmap.mmap(left.fd, 0), address_file, owner=True, adopted=True)
        except ValueError:
            os.close(left.fd)
            return None
        except BaseException:
            os.close(left.fd)
            raise
        try:
            if share.manifest() != manifest:
                raise WeightsMismatchError("manifest", "belongs to another model")
            share._flat = share._open_flat(manifest)
        except WeightsMismatchError:
            share.close()
            return None
        left.claim()
        return share

    @classmethod
    def attach(cls, model: nn.Module, address_file: Path, *, tokenizer: str = "") -> Self:
        """Bind a model, on meta or built, to the weights in the address file, read-only.

        Buffers on meta that are not shared (RoPE tables) are computed from the module's configuration.

        Args:
            tokenizer: Fingerprint of this side's tokenizer; empty only if the owner has none either.

        Raises:
            SegmentGoneError: There is no address, or it is outdated: the owner is (re)starting.
            WeightsMismatchError: The model has other tensors; names the first that differs. It is unchanged.
        """
        share = cls.open(address_file)
        try:
            manifest = share.manifest()
            computed = prove(model, manifest, tokenizer)
            share._flat = flat = share._open_flat(manifest)
            computed = {
                name: (module, leaf, one.to(flat.device)) for name, (module, leaf, one) in computed.items()
            }
            adopt(model, manifest, share._views(manifest), computed)
        except BaseException:
            share.close()
            raise
        share._model, share._tokenizer = model, tokenizer
        return share

    @classmethod
    def open(cls, address_file: Path) -> Self:
        """Map the weights in the address file read-only, without binding a model.

        Raises:
            SegmentGoneError: There is no address, or it is outdated: the owner is (re)starting.
            WeightsMismatchError: They are shared with another backend.
        """
        address = segment_file.read_address(address_file)
        if address is None:
            raise SegmentGoneError(str(address_file), "no address has been published yet")
        path = Path(address.path)
        if not path.name.endswith(f"-{cls.KIND}"):
            raise WeightsMismatchError("backend", f"{path.name} is not shared as {cls.KIND}")
        segment = segment_file.open_existing(path, address.nonce)
        try:
            memory = mmap.mmap(segment.fd, 0, prot=mmap.PROT_READ)
            return cls(segment, memory, address_file, owner=False)
        except ValueError:
            os.close(segment.fd)
            raise SegmentGoneError(address.path, "it is empty") from None
        except BaseException:
            os.close(segment.fd)
            raise

    @property
    def path(self) -> Path:
        """File of the segment."""
        return self._segment.path

    @property
    def nonce(self) -> str:
        """Unique id of the segment."""
        return self._segment.nonce

    @property
    def version(self) -> PolicyVersion:
        """Version of the last complete write; inside `reading` use the yielded one."""
        return self._lock.version

    def is_torn(self) -> bool:
        """Return whether the weights are half-written and no writer is at work."""
        return self._lock.is_torn()

    def write_at_hand(self) -> tuple[int, int] | None:
        """See `WeightLock.write_at_hand`."""
        return self._lock.write_at_hand()

    def is_replaced(self) -> bool:
        """Return whether the address file names another segment. Reads the file."""
        address = segment_file.read_address(self._address_file)
        return address is not None and address.nonce != self.nonce

    def owner_lives(self) -> bool:
        """Return whether the owner lives. The weights of a dead owner stay as they are."""
        owner = self._segment.owner()
        return owner is not None and owner.alive()

    def reading(self, patience_s: float = READ_PATIENCE_S) -> Reading:
        """Hold the weights still and yield their version; see `WeightLock.begin_reading`."""
        return Reading(self, patience_s)

    def keeping(self) -> AbstractContextManager[None]:
        """Keep the lock between readings in quick succession; see `WeightLock.keeping`."""
        return self._lock.keeping()

    def _begin_reading(self, patience_s: float) -> PolicyVersion:
        version = self._lock.begin_reading(patience_s)
        if self._scratch is not None:
            self._scratch.answer()
        return version

    def _end_reading(self) -> None:
        self._lock.end_reading()

    @contextmanager
    def writing(
        self, version: PolicyVersion, *, restoring: bool = False, patience_s: float = WRITE_PATIENCE_S
    ) -> Iterator[None]:
        """Lock out readers while the block changes the weights to `version`; see `WeightLock.writing`."""
        with self._lock.writing(version, restoring=restoring, patience_s=patience_s):
            yield
            if self._source is not None:
                self._copy(self._source)
            self._settle()
        self._answer()

    def _copy(self, source: Source) -> None:
        """Copy the tensors of a source into the shared memory, one by one."""
        manifest = self.manifest()
        views = self._views(manifest)
        with torch.no_grad():
            for spec, tensor in arriving(manifest, source()):
                views[spec.name].copy_(tensor)

    def _settle(self) -> None:
        """Wait for the device before the lock is released; nothing to do on the CPU."""

    def _answer(self) -> None:
        if self._scratch is not None:
            self._scratch.answer()

    def verify(
        self,
        level: Level,
        *,
        inputs: Tensor | None = None,
        patience_s: float = ANSWER_PATIENCE_S,
        exact: bool = False,
    ) -> Proof:
        """Verify the share up to `level`; see `SharedWeights.verify`."""
        assert self._model is not None
        assert self._flat is not None
        require_own_tensors(self._source, level)
        manifest, answered, digests, logits = self.manifest(), None, {}, ""
        prove(self._model, manifest, self._tokenizer)
        if level >= Level.ALIASING:
            require_aliases(self._model, manifest, self._flat.data_ptr())
        if level >= Level.NONCE:
            answered = self._ask(patience_s)
        with self.reading() as version:
            if level >= Level.DIGESTS:
                digests = tensor_digests(self._model, manifest, exact=exact)
            if level >= Level.LOGITS:
                if inputs is None:
                    raise ValueError("inputs: required for LOGITS")
                logits = logits_digest(self._model, inputs)
        return Proof(level, version, len(manifest.tensors), manifest.end, answered, digests, logits)

    def _ask(self, patience_s: float) -> float:
        if self._scratch is None:
            raise WeightsMismatchError("scratch page", f"{self.path} cannot be mapped for writing")
        # Answers while it waits: two sides that ask each other would both wait forever.
        return self._scratch.ask(patience_s, self._answer)

    def manifest(self) -> WeightManifest:
        """Decode the manifest of the segment.

        Raises:
            WeightsMismatchError: It is damaged, or has another layout.
        """
        assert self._memory is not None
        offset, nbytes = self._lock.manifest_range
        end = offset + nbytes
        if offset < PAGE_BYTES or not 0 < nbytes <= MANIFEST_LIMIT_BYTES or end > len(self._memory):
            raise WeightsMismatchError("manifest", f"lies at {offset}, {nbytes} bytes: outside the segment")
        try:
            manifest = msgspec.json.decode(self._memory[offset:end], type=WeightManifest)
        except msgspec.DecodeError as error:
            raise WeightsMismatchError("manifest", str(error)) from None
        if manifest.base != self._base() or manifest.base + self._inside(manifest) > offset:
            raise WeightsMismatchError("manifest", "its tensors lie outside the segment")
        return manifest

    def _inside(self, manifest: WeightManifest, /) -> int:
        """Return the bytes of tensors inside the segment itself."""
        return manifest.end

    def _open_flat(self, manifest: WeightManifest) -> Tensor:
        assert self._memory is not None
        with warnings.catch_warnings():
            # Torch warns that it has no read-only tensors; the read-only mapping itself refuses writes.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._memory, dtype=torch.uint8, count=manifest.end, offset=manifest.base)

    def _views(self, manifest: WeightManifest) -> dict[str, Tensor]:
        assert self._flat is not None
        return {spec.name: view(self._flat, spec) for spec in manifest.tensors}

    def physical_views(self) -> dict[str, Tensor]:
        """Return the tensors of a server with fused projections, by its names."""
        manifest = self.manifest()
        self._flat = self._open_flat(manifest) if self._flat is None else self._flat
        return {one.name: view(self._flat, one) for one in manifest.fused}

    def close(self, *, unlink: bool = False) -> None:
        """Release the segment. May be called twice.

        The memory stays mapped while a tensor of the model is alive, so the model stays usable, without the lock. A
        segment that stays has no owner any more: the next share of the run takes it over, also in this process, and a
        model that was bound to it then has the values of the next.

        Args:
            unlink: Also remove the segment and its address file; for the owner at its orderly end.
        """
        if self._memory is None:
            return
        self._lock.close()
        if self._scratch is not None:
            self._scratch.close()
        if unlink:
            if not self.is_replaced():
                self._address_file.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        elif self._owner:
            self._segment.release()
        os.close(self._segment.fd)
        self._memory = self._scratch = self._model = self._flat = None
