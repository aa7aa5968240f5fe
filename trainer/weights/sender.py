"""A trainer that sends its weights to whichever vLLM its run has: what `backend = "vllm_http"` stands for.

    trainer: model/, weights.json (who sends)  ->  engine: starts vLLM, vllm.json (where it is)
        ->  trainer: the weights, whole  ->  engine: serves;  and from then on each step, when `writing` ends

That vLLM dies, or does not take a step, is no failure of the trainer: the step stands. Before the next batch is asked
for, `supply` waits until there is a vLLM again, and sends it the weights whole. One whose model is another ends the
trainer, by name; so does one that lives and has refused the weights several times in a row. Why it waits is told in the
address file, for `rolloutmq status`, and now and then in the log.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec.structs import astuple
from torch import nn

from rolloutmq.bus import segments
from rolloutmq.bus.refrain import Refrain
from rolloutmq.bus.rundir import FILE_POLL_S, read_json, write_json
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.records import SentAddress, VllmAddress
from rolloutmq.schemas.sharing import SegmentInUseError, WeightsNotSentError
from rolloutmq.trainer.weights import address
from rolloutmq.trainer.weights.vllm_http import SentWeights

logger = logging.getLogger(__name__)

REFUSALS: Final = 5
"""In a row, by a vLLM that lives. What was short for a moment, such as room for the file, is there by then or never."""
PAUSE_S: Final = 1.0
"""Between two of them."""


class Sender:
    """The weights of a trainer and the vLLM that is to have them. Make it by `create`. Belongs to one thread."""

    def __init__(
        self, model: nn.Module, address_file: Path, vllm_file: Path, version: PolicyVersion, tokenizer: str
    ) -> None:
        self.version = version
        """What the values of the model are."""
        self._model = model
        self._address_file = address_file
        self._vllm_file = vllm_file
        self._tokenizer = tokenizer
        self._sent: SentWeights | None = None
        """None as long as no vLLM has them."""
        self._nonce = ""
        """Of the vLLM that has them."""
        self._waits = ""
        """Why nobody has them."""
        self._refrain = Refrain()

    @classmethod
    def create(
        cls,
        model: nn.Module,
        address_file: Path,
        vllm_file: Path,
        *,
        version: PolicyVersion = PolicyVersion(),
        tokenizer: str = "",
    ) -> "Sender":
        """Say who sends; nothing is sent yet, see `supply`.

        Args:
            model: Its parameters stay its own.
            address_file: `weights.json` of the run.
            vllm_file: `vllm.json` of the run.
            version: What the values are.
            tokenizer: Fingerprint of the model's tokenizer.

        Raises:
            SegmentInUseError: A living process sends there.
        """
        found = address.read_sent(address_file)
        me = segments.Owner.current()
        if found is not None and found.sender != me and address.owner_lives(address_file):
            raise SegmentInUseError(str(address_file), found.sender[0])
        address.sweep(address_file)
        made = cls(model, address_file, vllm_file, version, tokenizer)
        made._tell()
        return made

    @contextmanager
    def writing(self, version: PolicyVersion, /) -> Iterator[None]:
        """Send the weights as `version` when the block has changed them.

        A vLLM that does not take them is left to `supply`. Blocks for as long as the transfer takes.
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
            logger.warning("weights not sent version=%d.%d why=%s", *astuple(version), error)
            self._sent = None
        self._tell()

    def supply(self, wait_s: float = math.inf) -> bool:
        """Wait until the run's vLLM has the weights, and send them where it has not. KeyboardInterrupt ends the wait.

        Args:
            wait_s: Longest time to wait for a vLLM that is away.

        Returns:
            Whether it has them.

        Raises:
            WeightsMismatchError: vLLM's model is another; names the first tensor that differs.
            WeightsNotSentError: It lives, and has refused them several times.
        """
        refused, until = 0, time.monotonic() + wait_s
        while not self._is_supplied():
            if not refused and time.monotonic() > until:
                return False
            found = read_json(self._vllm_file, VllmAddress)
            if found is None:
                self._wait(f"no vLLM has said in {self._vllm_file.name} where it is", FILE_POLL_S)
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
        """Let some time pass, and say why."""
        if self._refrain.is_due(why, time.monotonic()):
            logger.warning("waiting for=vllm version=%d.%d why=%s", *astuple(self.version), why)
        if why != self._waits:
            self._waits = why
            self._tell()
        time.sleep(pause_s)

    def _is_supplied(self) -> bool:
        """Tell whether the vLLM that the run has now has the weights. Reads a file."""
        if self._sent is None:
            return False
        found = read_json(self._vllm_file, VllmAddress)
        return found is not None and found.nonce == self._nonce

    def _send_whole(self, found: VllmAddress) -> None:
        self._sent = SentWeights.create(
            self._model, found.url, segments.SHM, version=self.version, tokenizer=self._tokenizer
        )
        self._nonce, self._waits = found.nonce, ""
        self._refrain = Refrain()
        logger.info("weights sent to=%s version=%d.%d", found.url, *astuple(self.version))
        self._tell()

    def _tell(self) -> None:
        """Say who sends, what has arrived, and why it waits."""
        arrived = self.version if self._sent else None
        me = segments.Owner.current()
        write_json(self._address_file, SentAddress(sender=me, version=arrived, waits=self._waits))

    def close(self, *, unlink: bool = False) -> None:
        """Let go of the weights; with `unlink`, say no more who sends. What vLLM has it keeps."""
        if unlink:
            self._address_file.unlink(missing_ok=True)
