"""One copy of the weights for trainer and server, in a file in /dev/shm that both map.

    control page | scratch page | tensors | manifest

The control page has the segment's header (`bus.segments`) and the words of `lock`; the scratch page is that of `nonce`.

The owner (trainer) puts the weights of its model there and binds the model's parameters to them, so that whatever it
writes in place under `writing` is what every reader has. A reader binds a model built on meta to the same bytes,
mapped read-only: a stray write there is a crash of the reader, never a changed policy. Attaching fails closed, see
`manifest`; nothing is copied, converted or left on meta.

The values of the owner's model are the truth: `create_or_adopt` writes them, whole, whether the segment is new or
was left by an owner that was killed, in mid-write perhaps. Make the optimizer after it: the parameters are new objects.
One share belongs to one thread at a time.
"""

import logging
import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final, Self

import msgspec
import torch
from torch import Tensor, nn

from rolloutmq.bus import segments
from rolloutmq.bus.segments import Segment
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import SegmentGoneError, WeightsBusyError, WeightsMismatchError
from rolloutmq.trainer.weights.binding import adopt, bind, manifest_of, prove
from rolloutmq.trainer.weights.lock import PAGE_BYTES, READ_PATIENCE_S, WRITE_PATIENCE_S, WeightLock
from rolloutmq.trainer.weights.manifest import WeightManifest
from rolloutmq.trainer.weights.nonce import SCRATCH_AT, Scratch
from rolloutmq.trainer.weights.placement import align
from rolloutmq.trainer.weights.proof import logits_digest, require_aliases, tensor_digests
from rolloutmq.trainer.weights.reading import Reading
from rolloutmq.trainer.weights.room import mapped, open_left
from rolloutmq.trainer.weights.share import Level, Proof
from rolloutmq.trainer.weights.views import view

logger = logging.getLogger(__name__)

MANIFEST_LIMIT_BYTES: Final = 64 << 20
TENSORS_AT: Final = SCRATCH_AT + PAGE_BYTES
ANSWER_PATIENCE_S: Final = 10.0
"""The other side answers with its next step."""
ADOPT_PATIENCE_S: Final = 10.0
"""A reader holds the lock for one forward pass. One that holds it for longer is slow, and attaches anew to a new
segment, or it is stopped, and would hold up every life of the trainer until restarts run out."""


class WeightShare:
    """The weights of one segment, bound to one model. Make it by `create_or_adopt` or `attach`."""

    KIND: ClassVar = "weights"
    """In the name of the segment."""

    def __init__(
        self, segment: Segment, memory: mmap.mmap, address_file: Path, *, owner: bool, adopted: bool = False
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
        self._flat: Tensor | None = None
        """All tensors as bytes, from offset 0."""
        self._tokenizer = ""
        self.adopted = adopted
        """Whether the segment was there before this owner."""

    @classmethod
    def create_or_adopt(
        cls,
        model: nn.Module,
        address_file: Path,
        *,
        version: PolicyVersion = PolicyVersion(),
        fused: bool = False,
        tokenizer: str = "",
    ) -> Self:
        """Share the weights of a model, in the segment that a killed owner left if it fits, and name it in a file.

        Readers that are attached to that segment stay attached and see the new values under the new version. If one of
        them keeps its lock for longer than `ADOPT_PATIENCE_S`, there is a new segment, to which all attach anew.

        Args:
            model: Its values become the shared ones and its parameters views of them.
            version: What the values are.
            fused: Lay the tensors out so that a server with fused projections can map them, see `placement`.
            tokenizer: Fingerprint of the model's tokenizer, see `tokenizer`.

        Raises:
            SegmentInUseError: A living process owns the segment that the address file names.
            WeightsMismatchError: The model has tensors that cannot be shared.
            MissingError: There is not enough shared memory.
        """
        manifest = manifest_of(model, fused=fused, tokenizer=tokenizer)
        manifest = msgspec.structs.replace(manifest, base=cls._base())
        left = open_left(address_file)
        heir = cls._adopt(left, manifest, address_file) if left else None
        if heir is not None:
            try:
                heir._give(model, manifest, version, tokenizer, ADOPT_PATIENCE_S)
            except WeightsBusyError as error:
                logger.warning("segment not taken over path=%s reason=%s", heir.path, str(error))
            else:
                return heir
        share = cls._create(manifest, address_file, model)
        share._give(model, manifest, version, tokenizer, WRITE_PATIENCE_S)
        if left:
            left.path.unlink(missing_ok=True)
        return share

    def _give(
        self,
        model: nn.Module,
        manifest: WeightManifest,
        version: PolicyVersion,
        tokenizer: str,
        patience_s: float,
    ) -> None:
        """Put the weights of a model here and tell everybody, or let go."""
        try:
            with self.writing(version, restoring=True, patience_s=patience_s), torch.no_grad():
                bind(model, manifest, self._views(manifest), keep=True)
            self._model, self._tokenizer = model, tokenizer
            segments.write_address(self._address_file, self._segment)
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
        segment = segments.create(cls.KIND, offset + len(encoded))
        memory = mapped(segment)
        memory[offset:] = encoded
        share = cls(segment, memory, address_file, owner=True)
        share._lock.place_manifest(offset, len(encoded))
        share._flat = share._open_flat(manifest)
        return share

    @classmethod
    def _adopt(cls, left: Segment, manifest: WeightManifest, address_file: Path) -> Self | None:
        """Take over what a dead owner left, or close it and return None if it is of another model."""
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
                raise WeightsMismatchError("manifest", "is of another model")
            share._flat = share._open_flat(manifest)
        except WeightsMismatchError:
            share.close()
            return None
        left.claim()
        return share

    @classmethod
    def attach(cls, model: nn.Module, address_file: Path, *, tokenizer: str = "") -> Self:
        """Bind a model, on meta or built, to the weights that the address file names, read-only.

        Buffers that are not shared and are on meta (RoPE tables) are computed anew from the module's configuration.

        Args:
            tokenizer: Fingerprint of the tokenizer on this side, empty if it has none: then the owner has none either.

        Raises:
            SegmentGoneError: There is no address, or it is out of date: the owner is (re)starting.
            WeightsMismatchError: The model means other tensors; names the first that differs. It is unchanged.
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
        """Map the weights that the address file names, read-only, and bind nothing to them yet.

        Raises:
            SegmentGoneError: There is no address, or it is out of date: the owner is (re)starting.
            WeightsMismatchError: They are shared in another way.
        """
        address = segments.read_address(address_file)
        if address is None:
            raise SegmentGoneError(str(address_file), "no address was published yet")
        path = Path(address.path)
        if not path.name.endswith(f"-{cls.KIND}"):
            raise WeightsMismatchError("backend", f"{path.name} is not shared by way of {cls.KIND}")
        segment = segments.open_existing(path, address.nonce)
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
        """What tells this segment from every other."""
        return self._segment.nonce

    @property
    def version(self) -> PolicyVersion:
        """Version of the last whole write; inside `reading` use what that yields."""
        return self._lock.version

    def is_torn(self) -> bool:
        """Tell whether the weights are half-written and nobody is at work on them."""
        return self._lock.is_torn()

    def write_at_hand(self) -> tuple[int, int] | None:
        """See `WeightLock.write_at_hand`."""
        return self._lock.write_at_hand()

    def is_replaced(self) -> bool:
        """Tell whether the address file names another segment by now. Reads the file."""
        address = segments.read_address(self._address_file)
        return address is not None and address.nonce != self.nonce

    def owner_lives(self) -> bool:
        """Tell whether somebody is there who may write. The weights of a dead owner stay what they were."""
        owner = self._segment.owner()
        return owner is not None and owner.alive()

    def reading(self, patience_s: float = READ_PATIENCE_S) -> Reading:
        """Hold the weights still and yield their version; see `WeightLock.begin_reading`."""
        return Reading(self, patience_s)

    def keeping(self) -> AbstractContextManager[None]:
        """Keep the weights between readings that follow each other at once; see `WeightLock.keeping`."""
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
        """Keep readers out while the block changes the weights to `version`; see `WeightLock.writing`."""
        with self._lock.writing(version, restoring=restoring, patience_s=patience_s):
            yield
            self._settle()
        self._answer()

    def _settle(self) -> None:
        """Let the device finish what was begun, before others get the lock; the CPU has finished."""

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
        """Climb the ladder to `level`; see `SharedWeights.verify`."""
        assert self._model is not None
        assert self._flat is not None
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
                    raise ValueError("LOGITS needs inputs")
                logits = logits_digest(self._model, inputs)
        return Proof(level, version, len(manifest.tensors), manifest.end, answered, digests, logits)

    def _ask(self, patience_s: float) -> float:
        if self._scratch is None:
            raise WeightsMismatchError("scratch page", f"{self.path} cannot be mapped for writing")
        # Two that ask each other at once would both wait.
        return self._scratch.ask(patience_s, self._answer)

    def manifest(self) -> WeightManifest:
        """Decode the manifest of the segment.

        Raises:
            WeightsMismatchError: It is damaged, or of another layout.
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

    def _inside(self, manifest: WeightManifest) -> int:
        """Bytes of tensors that the segment itself must have room for."""
        return manifest.end

    def _open_flat(self, manifest: WeightManifest) -> Tensor:
        assert self._memory is not None
        with warnings.catch_warnings():
            # Torch has no read-only tensors and says so; the read-only mapping itself refuses the write.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._memory, dtype=torch.uint8, count=manifest.end, offset=manifest.base)

    def _views(self, manifest: WeightManifest) -> dict[str, Tensor]:
        assert self._flat is not None
        return {spec.name: view(self._flat, spec) for spec in manifest.tensors}

    def physical_views(self) -> dict[str, Tensor]:
        """Return every tensor as a server with fused projections has it, by that server's names."""
        manifest = self.manifest()
        self._flat = self._open_flat(manifest) if self._flat is None else self._flat
        return {one.name: view(self._flat, one) for one in manifest.fused}

    def close(self, *, unlink: bool = False) -> None:
        """Let go of the segment. May be called twice.

        The memory itself stays mapped for as long as a tensor of the model is alive, so a model can be used, though
        not under the lock any more.

        Args:
            unlink: Remove the segment and the address file that names it; for the owner at its orderly end.
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
        os.close(self._segment.fd)
        self._memory = self._scratch = self._model = self._flat = None
