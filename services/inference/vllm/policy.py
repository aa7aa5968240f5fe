"""Policy of a vLLM engine: model, limits, and the state of its weights.

With `SharedWeightsPolicy`, vLLM maps the trainer's memory, and this process reads its control page. With
`SentWeightsPolicy`, the trainer transfers the weights, and only vLLM knows what it has.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Self

from transformers import AutoConfig

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.errors import SegmentGoneError, WeightsBusyError, WeightsMismatchError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.app import WATCH_S
from rolloutmq.services.inference.openai.requests import Limits
from rolloutmq.services.inference.tiny.policy import end_ids
from rolloutmq.services.inference.tokenizer import TextTokenizer
from rolloutmq.services.inference.vllm import version_label
from rolloutmq.services.inference.vllm.client import EngineFailedError, EngineSilentError, VllmClient
from rolloutmq.trainer.weights.address import owner_lives
from rolloutmq.trainer.weights.cuda_ipc import share_kind
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S
from rolloutmq.trainer.weights.posix_shm import WeightShare

logger = logging.getLogger(__name__)

KEPT_S: Final = READ_PATIENCE_S
"""Seconds a write or a transfer may last before requests are refused; vLLM aborts its own after the same time."""


class VllmPolicy(ABC):
    """Model directory and weight state of a vLLM engine."""

    def __init__(self, layout: RunLayout, max_rows: int) -> None:
        config = AutoConfig.from_pretrained(layout.model, local_files_only=True)
        sizes = config.get_text_config()
        self.text = TextTokenizer(layout.model)
        run, _ = load_run(layout.root)
        self.limits = Limits(
            run.model.name, int(sizes.max_position_embeddings), int(sizes.vocab_size), max_rows
        )
        self.end_ids: Sequence[int] = end_ids(layout, config)
        self._layout = layout

    @property
    @abstractmethod
    def version(self) -> PolicyVersion:
        """Version of the last complete write or transfer."""

    @abstractmethod
    def is_torn(self) -> bool:
        """Return whether the weights are half-written and no writer is at work."""

    @abstractmethod
    def kept(self, now: float) -> WeightsBusyError | None:
        """Return an error that names a writer holding the weights longer than any write takes, or None."""

    @abstractmethod
    async def followed(self, client: VllmClient, now: float) -> "VllmPolicy":
        """Check the weights, called repeatedly; return the policy to serve from now on.

        Raises:
            WeightsMismatchError: The trainer shares weights that do not match vLLM's model; names the tensor.
            EngineFailedError: vLLM does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the weights."""


class SharedWeightsPolicy(VllmPolicy):
    """Policy whose weights vLLM maps."""

    def __init__(self, layout: RunLayout, share: WeightShare, max_rows: int) -> None:
        super().__init__(layout, max_rows)
        self._share = share
        self._write: tuple[int, int] | None = None
        self._write_since = 0.0
        self._throttle = LogThrottle()

    @classmethod
    async def begun(cls, layout: RunLayout, client: VllmClient, max_rows: int) -> Self | None:
        """Let vLLM attach; None if the trainer is about to share other weights.

        Raises:
            WeightsMismatchError: The trainer's weights do not match vLLM's model; names the tensor.
            EngineFailedError: vLLM does not answer.
        """
        tokenizer = directory_fingerprint(layout.model)
        answer = await client.call("attach_weights", str(layout.weights.absolute()), tokenizer)
        if "error" in answer:
            if answer.get("again"):
                logger.warning("vllm not attached error=%s", answer["error"])
                return None
            raise WeightsMismatchError("vLLM", answer["error"])
        try:
            share = share_kind(layout.weights).open(layout.weights)
        except SegmentGoneError:
            return None
        if share.path.name != answer["segment"]:  # replaced meanwhile, and vLLM has not verified the new one
            share.close()
            return None
        logger.info("vllm attached segment=%s version=%s", answer["segment"], answer["version"])
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
        """See `VllmPolicy.followed`: a new policy once vLLM has attached to a new segment."""
        write = self._share.write_at_hand()
        if write != self._write:
            self._write, self._write_since = write, now
        try:
            if not self._share.is_replaced():
                return self
        except OSError as error:  # such as want of descriptors: the next look counts
            if self._throttle.is_due(str(error), now):
                logger.warning("weights not looked for error=%s", error)
            return self
        # The model directory may be that of a new trainer: read it again.
        fresh = await self.begun(self._layout, client, self.limits.max_rows)
        if fresh is None:
            return self
        self.close()
        return fresh

    def close(self) -> None:
        """See `VllmPolicy.close`."""
        self._share.close()


class SentWeightsPolicy(VllmPolicy):
    """Policy whose weights the trainer transfers to vLLM."""

    def __init__(self, layout: RunLayout, version: PolicyVersion, max_rows: int) -> None:
        super().__init__(layout, max_rows)
        self._version = version
        self._paused_since: float | None = None
        self._torn = False

    @classmethod
    async def begun(cls, layout: RunLayout, client: VllmClient, max_rows: int) -> Self | None:
        """Return the policy if vLLM has complete weights, else None.

        Raises:
            EngineFailedError: vLLM does not answer.
        """
        version = await _version_of(client)
        if version is None:
            return None
        logger.info("vllm received version=%s", version_label.of(version))
        return cls(layout, version, max_rows)

    @property
    def version(self) -> PolicyVersion:
        """See `VllmPolicy.version`."""
        return self._version

    def is_torn(self) -> bool:
        """Return whether a transfer was begun and abandoned: its sender is dead, or exceeded the longest
        transfer time.

        vLLM answers no requests meanwhile.
        """
        return self._torn

    def kept(self, now: float) -> WeightsBusyError | None:  # noqa: ARG002 - a hanging transfer counts as torn
        """Return None: no writer can hold a copy."""
        return None

    def close(self) -> None:
        """Do nothing: the copy is vLLM's."""

    async def followed(self, client: VllmClient, now: float) -> VllmPolicy:
        """See `VllmPolicy.followed`."""
        try:
            version = await _version_of(client)
        except EngineSilentError:
            return self  # it may be stopped, or busy with a large transfer: the last known state counts
        except EngineFailedError:
            await asyncio.sleep(WATCH_S)  # if it died, its log has a better reason
            raise
        if version is not None:
            self._version, self._paused_since, self._torn = version, None, False
            return self
        self._paused_since = now if self._paused_since is None else self._paused_since
        self._torn = now - self._paused_since >= KEPT_S or not owner_lives(self._layout.weights)
        return self


async def _version_of(client: VllmClient) -> PolicyVersion | None:
    """Return the version of vLLM's weights; None if they are incomplete or were never transferred."""
    label = await client.sent_version()
    return None if label is None else version_label.version(label)
