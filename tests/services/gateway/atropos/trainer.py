"""The example trainer of Atropos, run by Atropos' interpreter: `python trainer.py URL BATCH_SIZE RECORD`.

It registers and fetches with the functions of `example_trainer` themselves, their timeouts and retries, and pads what
it got; it trains nothing. Torch, which they hold arrays in, is played by a few lines, and what loads models is left
out. What was fetched is written down as it came.
"""

import importlib.util
import json
import sys
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from typing import Any

SEQUENCE = 64
FOREVER = 1 << 30


class Tensor:
    """An array that can be looked at in another shape."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def view(self, *shape: int) -> "Tensor":
        return Tensor(self.array.reshape(shape))


def stand_in() -> None:
    """Let `example_trainer` be loaded without torch, and without what loads models."""
    torch: Any = ModuleType("torch")
    torch.Tensor = torch.tensor = Tensor
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    package = ModuleType("example_trainer")
    found = importlib.util.find_spec("example_trainer")
    assert found is not None
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules.update(torch=torch, example_trainer=package)


def main(url: str, batch_size: str, record: str) -> None:
    """Register, and fetch until ended."""
    stand_in()
    from example_trainer import api, data
    from example_trainer.config import TrainingConfig

    config = TrainingConfig(
        model_name="none",
        batch_size=int(batch_size),
        gradient_accumulation_steps=1,
        seq_len=SEQUENCE,
        training_steps=FOREVER,
        atropos_url=url,
    )
    fetch = data.get_batch
    with open(record, "a", buffering=1) as out:  # noqa: PTH123 - as short as the rest

        def fetched(**where: str) -> Any:
            answer = fetch(**where)
            out.write(json.dumps(deepcopy(answer)) + "\n")
            return answer

        data.get_batch = fetched
        assert api.check_atropos_api(url)
        api.register_trainer(config)
        while True:
            batches, _ = data.get_data(config.batch_size, config.seq_len, url)
            assert all(logprobs is not None for *_, logprobs in batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
