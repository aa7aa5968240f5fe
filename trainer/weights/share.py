"""What every way of sharing weights can do, whatever holds them; and the ladder by which a share is proven.

An owner (trainer) has a model and makes a share of it; a reader (inference server) attaches a model of its own. The
owner changes the weights inside `writing`, the reader uses them inside `reading` and stamps what comes of it with the
version that `reading` yields. Half-written weights are never read: a writer that died in mid-write leaves them torn,
and readers refuse them until somebody restored them whole.

    backend     holds the weights in                               copies   a version is there for a reader when
    posix_shm   a file in /dev/shm that both map                   none     `writing` ends
    cuda_ipc    GPU memory of the owner, opened by its readers     none     `writing` ends, the GPU done
    disk        a directory for each version                       one      the reader enters `reading` next
    vllm_http   vLLM's own, sent by the interface that it defines  one      `writing` ends; readers are vLLM alone

`verify` climbs the ladder to a level, from the bottom, and stops at the first rung that does not hold.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import WeightsMismatchError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rolloutmq.trainer.weights.manifest import WeightManifest


class Level(IntEnum):
    """Rungs of the ladder, each a stronger proof than the one below."""

    MANIFEST = 1
    """The model means the tensors of the manifest: names, types, shapes, ties, configuration, RoPE, tokenizer."""
    ALIASING = 2
    """Each of its tensors lies where the manifest says, and those that are tied in the same place."""
    NONCE = 3
    """The other side answers: what one writes there the other reads, both ways."""
    DIGESTS = 4
    """What every tensor holds, in two numbers or a sha256; equal to those of another proof of the same version."""
    LOGITS = 5
    """What the model makes of a given input; equal to another proof's, bit for bit, on the same kind of machine."""


@dataclass(frozen=True)
class Proof:
    """What a verification found. Two sides have the same weights if their proofs of one version are the same."""

    level: Level
    """The highest rung that holds."""
    version: PolicyVersion
    tensors: int
    nbytes: int
    answered_s: float | None = None
    """How long the other side took to answer."""
    digests: dict[str, str] = field(default_factory=dict)
    logits: str = ""

    def require_same(self, other: "Proof") -> None:
        """Prove that the weights of two sides are the same.

        Raises:
            WeightsMismatchError: They are not; names the first tensor that differs.
        """
        if self.version != other.version:
            raise WeightsMismatchError("version", f"{self.version} here, {other.version} there")
        for name in sorted(self.digests.keys() | other.digests.keys()):
            mine, theirs = self.digests.get(name, "nothing"), other.digests.get(name, "nothing")
            if mine != theirs:
                raise WeightsMismatchError(name, f"holds {mine} here, {theirs} there")
        if self.logits != other.logits:
            raise WeightsMismatchError("logits", f"{self.logits[:12]} here, {other.logits[:12]} there")


class Writable(Protocol):
    """What a trainer writes its steps into."""

    def writing(self, version: PolicyVersion, /) -> AbstractContextManager[None]:
        """Let the block change the weights to `version`; when it ends, whoever samples has them or will."""


class SharedWeights(Protocol):
    """One side of a share, bound to one model. Belongs to one thread at a time."""

    @classmethod
    def attach(cls, model: "nn.Module", address_file: Path, *, tokenizer: str = "") -> Self:
        """Bind a model to the weights that an address file names, or leave it as it is and say which tensor differs."""

    @property
    def version(self) -> PolicyVersion:
        """Version of the last whole write."""

    def manifest(self) -> "WeightManifest":
        """Return what the weights consist of."""

    def is_torn(self) -> bool:
        """Tell whether the weights are half-written and nobody is at work on them."""

    def is_replaced(self) -> bool:
        """Tell whether the address file names other weights by now."""

    def reading(self, patience_s: float = ...) -> AbstractContextManager[PolicyVersion]:
        """Hold the weights still and yield their version."""

    def keeping(self) -> AbstractContextManager[None]:
        """Let readings in the block follow each other at little cost; who writes waits for one of them, no longer."""

    def writing(
        self, version: PolicyVersion, *, restoring: bool = ..., patience_s: float = ...
    ) -> AbstractContextManager[None]:
        """Keep readers out while the block changes the weights to `version`."""

    def verify(
        self, level: Level, *, inputs: "Tensor | None" = None, patience_s: float = ..., exact: bool = False
    ) -> Proof:
        """Climb the ladder to `level`.

        Args:
            inputs: `(B, T)` token ids, for LOGITS.
            patience_s: How long the other side may take to answer, for NONCE.
            exact: Digests are sha256 and not two sums.

        Raises:
            WeightsMismatchError: A rung does not hold; names the tensor.
            WeightsSilentError: The other side did not answer.
        """

    def close(self, *, unlink: bool = False) -> None:
        """Let go of the weights; with `unlink`, remove what holds them: for the owner at its orderly end."""
