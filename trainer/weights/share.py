"""Interface of shared weights, for all backends, and the levels of their verification.

An owner (trainer) shares its model; a reader (inference server) attaches its own. The owner changes the weights inside
`writing`. The reader uses them inside `reading` and stamps its results with the yielded version. Half-written weights
are never read: if a writer dies mid-write the weights are torn, and readers refuse them until they are restored whole.

    backend     weights are in                              copies   readers see a version when
    posix_shm   a file in /dev/shm that both map            none     `writing` ends
    cuda_ipc    GPU memory of the owner                     none     `writing` ends and the GPU is done
    disk        a directory for each version                one      the reader next enters `reading`
    vllm_http   vLLM's own memory, transferred over HTTP    one      `writing` ends; vLLM is the only reader

`verify` checks the levels from the bottom up and stops at the first that fails.

A trainer whose modules are sharded or wrapped shares a model of the same configuration instead
(`policy.model.skeleton`), and passes a `Source`: its tensors, one by one, are what `writing` publishes.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.schemas.wire.envelope import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rolloutmq.trainer.weights.manifest import WeightManifest


Source = Callable[[], "Iterable[tuple[str, Tensor]]"]
"""Yields every tensor of a version by its name in the model: whole, on any device, in any order, tied ones under any of
their names. Called for each write, when its block has ended. So a state dict is `lambda: state.items()`, and a sharded
module gathers one tensor at a time (`trainer.sharding.gathered`), in which all its ranks take part."""


class Level(IntEnum):
    """Levels of verification, each stronger than the one before."""

    MANIFEST = 1
    """The model fits the manifest: names, types, shapes, ties, configuration, RoPE, tokenizer."""
    ALIASING = 2
    """Each tensor lies at its place in the shared memory, tied ones at the same place."""
    NONCE = 3
    """The other side answers: each reads what the other writes."""
    DIGESTS = 4
    """Digest of every tensor, two sums or a sha256; equal to those of another proof of the same version."""
    LOGITS = 5
    """Digest of the model's logits for a given input; bit-identical on machines of the same kind."""


@dataclass(frozen=True)
class Proof:
    """Result of a verification. Two sides have the same weights if their proofs of one version are equal."""

    level: Level
    """Highest level that holds."""
    version: PolicyVersion
    tensors: int
    nbytes: int
    answered_s: float | None = None
    """Seconds until the other side answered."""
    digests: dict[str, str] = field(default_factory=dict)
    logits: str = ""

    def require_same(self, other: "Proof") -> None:
        """Check that the weights of two sides are equal.

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


def require_own_tensors(source: Source | None, level: Level) -> None:
    """Check that a level can be verified: above MANIFEST it compares the model's own tensors.

    Raises:
        ValueError: The tensors come from a source.
    """
    if source is not None and level > Level.MANIFEST:
        raise ValueError(f"level: the tensors come from a source (got {level.name}); verify at a reader")


class Writable(Protocol):
    """Target of the trainer's steps."""

    def writing(self, version: PolicyVersion, /) -> AbstractContextManager[None]:
        """Let the block change the weights to `version`; at its end the servers have them or will get them."""
        ...


class SharedWeights(Protocol):
    """One side of a share, bound to one model. Belongs to one thread at a time."""

    @classmethod
    def attach(cls, model: "nn.Module", address_file: Path, *, tokenizer: str = "") -> Self:
        """Bind a model to the weights in an address file; on a mismatch leave it unchanged and name the tensor."""
        ...

    @property
    def version(self) -> PolicyVersion:
        """Version of the last complete write."""
        ...

    def manifest(self) -> "WeightManifest":
        """Return the manifest of the weights."""
        ...

    def is_torn(self) -> bool:
        """Return whether the weights are half-written and no writer is at work."""
        ...

    def is_replaced(self) -> bool:
        """Return whether the address file names other weights."""
        ...

    def reading(self, patience_s: float = ...) -> AbstractContextManager[PolicyVersion]:
        """Hold the weights still and yield their version."""
        ...

    def keeping(self) -> AbstractContextManager[None]:
        """Make readings in quick succession cheap; a writer waits for one of them at most."""
        ...

    def writing(
        self, version: PolicyVersion, *, restoring: bool = ..., patience_s: float = ...
    ) -> AbstractContextManager[None]:
        """Lock out readers while the block changes the weights to `version`."""
        ...

    def verify(
        self, level: Level, *, inputs: "Tensor | None" = None, patience_s: float = ..., exact: bool = False
    ) -> Proof:
        """Verify the share up to `level`.

        Args:
            inputs: `(B, T)` token ids, for LOGITS.
            patience_s: Seconds to wait for the other side, for NONCE.
            exact: Use sha256 digests instead of two sums.

        Raises:
            WeightsMismatchError: A level does not hold; names the tensor.
            WeightsSilentError: The other side did not answer.
        """
        ...

    def close(self, *, unlink: bool = False) -> None:
        """Release the weights; with `unlink`, remove them: for the owner at its orderly end."""
