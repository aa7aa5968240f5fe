"""Policy of the tiny server: the model in `model/` without weights of its own, bound to the trainer's.

The run's `weights.backend` decides how: the server maps the trainer's memory, or reads the newest version from disk
before its next forward pass. The trainer may start later, die, and come back. If it takes over the same segment,
nothing changes here. If it shares another segment, the server attaches to that one, and until then serves the old
weights under their old version.
"""

import logging
import time
from contextlib import suppress
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.errors import SegmentGoneError, WeightsDamagedError, WeightsMismatchError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.openai.requests import Limits
from rolloutmq.services.inference.tiny.generate import Generator
from rolloutmq.services.inference.tokenizer import TextTokenizer
from rolloutmq.trainer.weights import address
from rolloutmq.trainer.weights.backends import attach_as
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint

logger = logging.getLogger(__name__)


class Share(Protocol):
    """The weights of a served policy; see `WeightShare`."""

    @property
    def version(self) -> PolicyVersion: ...

    def is_torn(self) -> bool: ...

    def is_replaced(self) -> bool: ...

    def close(self) -> None: ...


class ServedPolicy:
    """One attachment: policy, tokenizer, and limits. Made by `attach`."""

    def __init__(
        self,
        policy: Any,
        share: Share,
        text: TextTokenizer,
        limits: Limits,
        generator: Generator,
    ) -> None:
        self.text = text
        self.limits = limits
        self.generate = generator.generate
        """See `Generator.generate`. For one thread at a time."""
        self._policy = policy
        self._share = share

    @classmethod
    def attach(
        cls, layout: RunLayout, *, max_rows: int, seed: int, refrain: LogThrottle | None = None
    ) -> "ServedPolicy | None":
        """Attach to the weights of a run; None while they are not there.

        Blocks for some 50 ms; with weights on disk, for as long as reading takes. Damage is logged, throttled
        by `refrain`.

        Raises:
            WeightsMismatchError: A live trainer shares weights of another model than that in `model/`.
            MissingError: `model/` has no tokenizer.
        """
        if not (layout.model / "config.json").is_file() or not layout.weights.is_file():
            return None
        run, _ = load_run(layout.root)
        backend, tokenizer = run.weights.backend, directory_fingerprint(layout.model)
        config = AutoConfig.from_pretrained(layout.model, local_files_only=True)
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
        try:
            share = attach_as(backend, policy, layout.weights, tokenizer=tokenizer)
        except SegmentGoneError:
            return None
        except WeightsDamagedError as error:
            if (refrain or LogThrottle()).is_due(str(error), time.monotonic()):
                logger.warning("weights not attached error=%s", error)
            return None  # a newer version may be whole
        except WeightsMismatchError:
            if address.owner_lives(layout.weights):
                raise
            return None  # left by an earlier run: the trainer will replace it
        version = share.version
        logger.info("attached backend=%s version=%d.%d", backend, version.incarnation, version.step)
        text = TextTokenizer(layout.model)
        sizes = config.get_text_config()
        limits = Limits(run.model.name, int(sizes.max_position_embeddings), int(sizes.vocab_size), max_rows)
        generator = Generator(
            policy, share, end_ids(layout, config), text.decode, seed, fp32_head=run.trainer.fp32_head
        )
        return cls(policy, share, text, limits, generator)

    @staticmethod
    def prepare(model: ModelConfig) -> None:
        """Import the code of the run's model, while the trainer starts: `attach` would take a second longer.

        Errors are left to the trainer, which tells them.
        """
        with suppress(Exception), torch.device("meta"):
            found = (
                AutoConfig.from_pretrained(model.path, local_files_only=True)
                if model.path
                else LlamaConfig(num_hidden_layers=1)
            )
            AutoModelForCausalLM.from_config(found)

    @property
    def version(self) -> PolicyVersion:
        """Version of the last complete write; with weights on disk, the version read last."""
        return self._share.version

    def is_torn(self) -> bool:
        """Return whether the weights are half-written by a dead trainer, or the newest files are damaged."""
        return self._share.is_torn()

    def is_replaced(self) -> bool:
        """Return whether another life of the trainer now shares weights, in another segment or files."""
        return self._share.is_replaced()

    def close(self) -> None:
        """Release the weights."""
        self._share.close()


def end_ids(layout: RunLayout, config: Any) -> list[int]:
    """Return the tokens that end a sequence; generation_config.json wins over config.json."""
    if (layout.model / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(layout.model, local_files_only=True).eos_token_id
    else:
        eos = None
    found = eos if eos is not None else config.get_text_config().eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)
