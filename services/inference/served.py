"""The policy as this server has it: built from `model/` without weights of its own, bound to those of the trainer.

How it gets them is the run's `weights.backend`: it maps the trainer's memory, or reads the newest version from disk
before its next forward pass. The trainer may come later, die, and come back. A segment that it takes over again needs
nothing here. A segment that was replaced by another is attached anew; until then the old weights are served, under the
version that they are.
"""

import logging
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rolloutmq.bus.refrain import Refrain
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.sharing import SegmentGoneError, WeightsDamagedError, WeightsMismatchError
from rolloutmq.services.inference.generate import Generator
from rolloutmq.services.inference.protocol import Limits
from rolloutmq.services.inference.text import Text
from rolloutmq.trainer.weights import address
from rolloutmq.trainer.weights.backends import attach_as
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.tokenizer import directory_fingerprint

logger = logging.getLogger(__name__)


class ServedPolicy:
    """One attachment: the policy, its tokenizer, and what it can serve. Made by `attach`."""

    def __init__(
        self, policy: Any, share: WeightShare | DiskShare, text: Text, limits: Limits, generator: Generator
    ) -> None:
        self.text = text
        self.limits = limits
        self.generate = generator.generate
        """See `Generator.generate`. For one thread at a time."""
        self._policy = policy
        self._share = share

    @classmethod
    def attach(
        cls, layout: RunLayout, *, max_rows: int, seed: int, refrain: Refrain | None = None
    ) -> "ServedPolicy | None":
        """Attach to the weights of a run, or return None as long as they are not there.

        Blocks, some 50 ms, and where weights are read from disk as long as that takes. Damage is told in the log; who
        tries again and again brings a `refrain`.

        Raises:
            WeightsMismatchError: A living trainer shares weights that are not of the model in `model/`.
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
            if (refrain or Refrain()).is_due(str(error), time.monotonic()):
                logger.warning("not attached why=%s", error)
            return None  # a newer version may be whole
        except WeightsMismatchError:
            if address.owner_lives(layout.weights):
                raise
            return None  # of an earlier run: the trainer will replace it
        version = share.version
        logger.info("attached backend=%s version=%d.%d", backend, version.incarnation, version.step)
        text = Text(layout.model)
        sizes = config.get_text_config()
        limits = Limits(run.model.name, int(sizes.max_position_embeddings), int(sizes.vocab_size), max_rows)
        generator = Generator(policy, share, end_ids(layout, config), text.decode, seed)
        return cls(policy, share, text, limits, generator)

    @property
    def version(self) -> PolicyVersion:
        """Version of the last whole write; of weights on disk, the one that was read last."""
        return self._share.version

    def is_torn(self) -> bool:
        """Tell whether the weights are half-written and nobody is at work on them, or the newest files are damaged."""
        return self._share.is_torn()

    def is_replaced(self) -> bool:
        """Tell whether it is another life of the trainer that shares weights by now, in another segment or files."""
        return self._share.is_replaced()

    def close(self) -> None:
        """Let go of the weights."""
        self._share.close()


def end_ids(layout: RunLayout, config: Any) -> list[int]:
    """Return the tokens that end a sequence; what is said for generation goes before what is said of the model."""
    if (layout.model / "generation_config.json").is_file():
        said = GenerationConfig.from_pretrained(layout.model, local_files_only=True).eos_token_id
    else:
        said = None
    found = said if said is not None else config.get_text_config().eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)
