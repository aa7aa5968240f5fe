"""The policy as a vLLM has it: what it is, and the state of its weights. Either they are the trainer's own, or a copy.

`LentPolicy`: vLLM maps the memory of the trainer, which this process looks at as well. `SentPolicy`: the trainer sends
them to vLLM, which alone knows what it has.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Self

from transformers import AutoConfig

from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.sharing import SegmentGoneError, WeightsBusyError, WeightsMismatchError
from rolloutmq.services.inference.front import WATCH_S
from rolloutmq.services.inference.protocol import Limits
from rolloutmq.services.inference.served import end_ids
from rolloutmq.services.inference.text import Text
from rolloutmq.services.inference.vllm import label
from rolloutmq.services.inference.vllm.client import EngineFailedError, EngineSilentError, VllmClient
from rolloutmq.trainer.weights.address import owner_lives
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.tokenizer import directory_fingerprint

logger = logging.getLogger(__name__)

KEPT_S: Final = READ_PATIENCE_S
"""How long one write or transfer may last before requests are refused, as vLLM refuses those that it has by then."""


class VllmPolicy(ABC):
    """What is read of the model's directory, and what is known of the weights."""

    def __init__(self, layout: RunLayout, max_rows: int) -> None:
        config = AutoConfig.from_pretrained(layout.model, local_files_only=True)
        sizes = config.get_text_config()
        self.text = Text(layout.model)
        run, _ = load_run(layout.root)
        self.limits = Limits(
            run.model.name, int(sizes.max_position_embeddings), int(sizes.vocab_size), max_rows
        )
        self.end_ids: Sequence[int] = end_ids(layout, config)
        self._layout = layout

    @property
    @abstractmethod
    def version(self) -> PolicyVersion:
        """Version of the last whole write or transfer."""

    @abstractmethod
    def is_torn(self) -> bool:
        """Tell whether the weights are half-written and nobody is at work on them."""

    @abstractmethod
    def kept(self, now: float) -> WeightsBusyError | None:
        """Say who keeps the weights for longer than any write takes, if somebody does."""

    @abstractmethod
    async def followed(self, client: VllmClient, now: float) -> "VllmPolicy":
        """Look at the weights, to be called again and again; return the policy to be served from now on.

        Raises:
            WeightsMismatchError: The trainer shares weights that vLLM does not take; names the tensor.
            EngineFailedError: vLLM does not say.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the weights."""


class LentPolicy(VllmPolicy):
    """Of weights that vLLM maps."""

    def __init__(self, layout: RunLayout, share: WeightShare, max_rows: int) -> None:
        super().__init__(layout, max_rows)
        self._share = share
        self._write: tuple[int, int] | None = None
        self._write_since = 0.0

    @classmethod
    async def begun(cls, layout: RunLayout, client: VllmClient, max_rows: int) -> Self | None:
        """Let vLLM attach; None if the trainer is about to share others.

        Raises:
            WeightsMismatchError: vLLM's model is not of the trainer's weights; names the tensor.
            EngineFailedError: vLLM does not say.
        """
        tokenizer = directory_fingerprint(layout.model)
        said = await client.call("attach_weights", str(layout.weights.absolute()), tokenizer)
        if "error" in said:
            if said.get("again"):
                logger.warning("not attached why=%s", said["error"])
                return None
            raise WeightsMismatchError("vLLM", said["error"])
        try:
            share = WeightShare.open(layout.weights)
        except SegmentGoneError:
            return None
        if share.path.name != said["segment"]:  # there is another by now, which vLLM has not proven
            share.close()
            return None
        logger.info("vllm attached segment=%s version=%s", said["segment"], said["version"])
        return cls(layout, share, max_rows)

    @property
    def version(self) -> PolicyVersion:
        """See `VllmPolicy.version`."""
        return self._share.version

    def is_torn(self) -> bool:
        """See `VllmPolicy.is_torn`."""
        return self._share.is_torn()

    def kept(self, now: float) -> WeightsBusyError | None:
        """See `VllmPolicy.kept`."""
        if self._write is None or now - self._write_since < KEPT_S:
            return None
        if self._share.write_at_hand() != self._write:  # it has just ended
            return None
        return WeightsBusyError(self._write[0], now - self._write_since)

    async def followed(self, client: VllmClient, now: float) -> VllmPolicy:
        """See `VllmPolicy.followed`: a new one where the trainer shares another segment, once vLLM has it."""
        write = self._share.write_at_hand()
        if write != self._write:
            self._write, self._write_since = write, now
        if not self._share.is_replaced():
            return self
        # What was read of the model's directory is of the trainer that was there before.
        fresh = await self.begun(self._layout, client, self.limits.max_rows)
        if fresh is None:
            return self
        self.close()
        return fresh

    def close(self) -> None:
        """See `VllmPolicy.close`."""
        self._share.close()


class SentPolicy(VllmPolicy):
    """Of weights that are sent to vLLM."""

    def __init__(self, layout: RunLayout, version: PolicyVersion, max_rows: int) -> None:
        super().__init__(layout, max_rows)
        self._version = version
        self._paused_since: float | None = None
        self._torn = False

    @classmethod
    async def begun(cls, layout: RunLayout, client: VllmClient, max_rows: int) -> Self | None:
        """Look whether vLLM has whole weights by now; None if not.

        Raises:
            EngineFailedError: vLLM does not say.
        """
        version = await _version_of(client)
        if version is None:
            return None
        logger.info("vllm received version=%s", label.of(version))
        return cls(layout, version, max_rows)

    @property
    def version(self) -> PolicyVersion:
        """See `VllmPolicy.version`."""
        return self._version

    def is_torn(self) -> bool:
        """Tell whether a transfer was begun and nobody ends it: its sender is dead, or took longer than any takes.

        vLLM answers nobody meanwhile.
        """
        return self._torn

    def kept(self, now: float) -> WeightsBusyError | None:  # noqa: ARG002 - a transfer that hangs counts as torn
        """Nobody keeps a copy."""
        return None

    def close(self) -> None:
        """Nothing is held: the copy is vLLM's."""

    async def followed(self, client: VllmClient, now: float) -> VllmPolicy:
        """See `VllmPolicy.followed`."""
        try:
            version = await _version_of(client)
        except EngineSilentError:
            return self  # it may be stopped, or at work on a large transfer: what was known last counts
        except EngineFailedError:
            await asyncio.sleep(WATCH_S)  # one that died has last words, and they say more
            raise
        if version is not None:
            self._version, self._paused_since, self._torn = version, None, False
            return self
        self._paused_since = now if self._paused_since is None else self._paused_since
        self._torn = now - self._paused_since >= KEPT_S or not owner_lives(self._layout.weights)
        return self


async def _version_of(client: VllmClient) -> PolicyVersion | None:
    """Ask vLLM of which version its weights are; None where they are not whole, or were never sent."""
    said = await client.call("sent_weights")
    return label.version(str(said.get("version"))) if said.get("whole") else None
