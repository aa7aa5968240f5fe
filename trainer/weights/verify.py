"""Verification of shared weights: aliases, digests and logits of one side, and questions between both sides.

A question on the scratch page and its answer, in each direction, show that both sides map the same memory:

    0  the owner's question   8  a reader's answer   16  a reader's question   24  the owner's answer

A question is a random number, its answer the complement. Readers map the weights read-only and only this page writable;
it holds no tensor, so a stray write there spoils one question. Each side answers when it uses the weights anyway (the
owner after a write, a reader at a read). So questions need no thread, and the answer comes with the next step. One
reader asks at a time: it locks the field of its question.
"""

import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import Final

import torch
from torch import Tensor, nn

from rolloutmq.bus.shm.segment_file import lock_byte
from rolloutmq.schemas.errors import WeightsMismatchError, WeightsSilentError
from rolloutmq.trainer.weights.manifest import WeightManifest, named_tensors

_CHUNK_WORDS: Final = 1 << 20
"""64-bit words per chunk, 8 MiB: extra memory of the position-weighted sum."""


def require_aliases(model: nn.Module, manifest: WeightManifest, start: int) -> None:
    """Check that every tensor of a model lies in the shared memory, at its offset, under each of its names.

    The model must fit the manifest, which is the level below.

    Args:
        start: Address of offset 0.

    Raises:
        WeightsMismatchError: One lies elsewhere, for example because a parameter was replaced.
    """
    tensors = dict(named_tensors(model))
    for spec in manifest.tensors:
        for name in (spec.name, *spec.ties):
            tensor = tensors[name]
            if spec.nbytes and tensor.data_ptr() != start + spec.offset:
                raise WeightsMismatchError(name, "is not in the shared memory any more")
            if tensor is not tensors[spec.name]:
                raise WeightsMismatchError(name, f"is not tied to {spec.name} any more")


def digest(tensor: Tensor, *, exact: bool = False) -> str:
    """Return a digest of a tensor: the sum and the position-weighted sum of its 64-bit words, or a sha256."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if exact:
        return hashlib.sha256(data.cpu().numpy().data).hexdigest()
    tail = -data.numel() % 8
    words = (torch.nn.functional.pad(data, (0, tail)) if tail else data).view(torch.int64)
    plain, placed = 0, 0
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        places = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
        plain += int(chunk.sum())
        placed += int((chunk * places).sum())
    return f"{plain % 2**64:016x}{placed % 2**64:016x}"


def tensor_digests(model: nn.Module, manifest: WeightManifest, *, exact: bool = False) -> dict[str, str]:
    """Return the digest of every tensor by name; the weights must not change meanwhile."""
    tensors = dict(named_tensors(model))
    return {spec.name: digest(tensors[spec.name], exact=exact) for spec in manifest.tensors}


@torch.no_grad()
def logits_digest(model: nn.Module, inputs: Tensor) -> str:
    """Return the sha256 of the logits of a causal language model for token ids `(B, T)`."""
    return digest(model(input_ids=inputs, use_cache=False).logits.contiguous(), exact=True)


PAGE_BYTES: Final = 4096

SCRATCH_AT: Final = PAGE_BYTES
"""Offset right behind the control page."""

_POLL_S: Final = 0.002

_MASK: Final = (1 << 64) - 1


class Scratch:
    """The scratch page of one segment, for one side."""

    def __init__(self, path: str | os.PathLike[str], inode: int, *, owner: bool) -> None:
        """Map the page.

        Raises:
            OSError: The file was replaced, or is not writable.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(self._fd).st_ino != inode:
                raise OSError(f"{os.fspath(path)} was replaced")
            self._memory = mmap(self._fd, PAGE_BYTES, offset=SCRATCH_AT)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = memoryview(self._memory).cast("Q")
        self._owner = owner
        self._answered = -1
        self._question, self._reply, self._asked, self._answer = (0, 1, 2, 3) if owner else (2, 3, 0, 1)

    def close(self) -> None:
        """Release the page."""
        self._words.release()
        self._memory.close()
        os.close(self._fd)

    def answer(self) -> None:
        """Answer the other side's question, if any; otherwise takes a fraction of a microsecond."""
        question = self._words[self._asked]
        if question != self._answered:
            self._words[self._answer] = question ^ _MASK
            self._answered = question

    def ask(self, patience_s: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Ask the other side and return the seconds until its answer. Blocks.

        Args:
            patience_s: Seconds to wait.
            meanwhile: Called repeatedly while waiting.

        Raises:
            WeightsSilentError: No answer: the other side is gone, or has not used the weights.
        """
        started = time.monotonic()
        with self._turn(started + patience_s):
            question = secrets.randbits(63) | 1
            self._words[self._question] = question
            while self._words[self._reply] != question ^ _MASK:
                waited = time.monotonic() - started
                if waited > patience_s:
                    raise WeightsSilentError("a reader" if self._owner else "the owner", waited)
                meanwhile()
                time.sleep(_POLL_S)
        return time.monotonic() - started

    @contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        place = SCRATCH_AT + 8 * self._question
        while not lock_byte(self._fd, place, fcntl.F_WRLCK):
            if time.monotonic() > until:
                raise WeightsSilentError("another reader, which holds the scratch page,", 0.0)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            lock_byte(self._fd, place, fcntl.F_UNLCK)
