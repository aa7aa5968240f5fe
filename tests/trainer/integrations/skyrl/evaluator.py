"""A process that only evaluates, beside a live training of the same name. Its argument is a JSON object.

Prints the stop reasons of an evaluation, of a training without `start`, of an empty batch, and of an evaluation after
`close`.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from rolloutmq.trainer.integrations.skyrl.generator import BusGenerator


def batch(phase: str, size: int) -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": "17"}]] * size,
        "env_classes": ["mine"] * size,
        "env_extras": [{}] * size,
        "sampling_params": {},
        "trajectory_ids": [SimpleNamespace(instance_id="7")] * size,
        "batch_metadata": SimpleNamespace(training_phase=phase, global_step=0),
    }


def evaluate(run_dir: str, size: int) -> None:
    generator = BusGenerator(run_dir, batch_sequences=size, deadline_s=60.0)

    def reasons(phase: str, prompts: int = size) -> list[str]:
        return sorted({*asyncio.run(generator.generate(batch(phase, prompts)))["stop_reasons"]})

    found = [reasons("eval"), reasons("train"), reasons("train", 0)]
    generator.close()
    print(json.dumps([*found, reasons("eval")]))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    evaluate(**json.loads(sys.argv[-1]))
