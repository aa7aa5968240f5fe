"""The data path of TRL's `AsyncGRPOTrainer` on the CPU: its queue data set and its planner, fed by our worker.

`python async_player.py '{"run_dir": ..., "passes": ..., "record": ...}'`, in TRL's own environment. Each micro-batch is
one optimizer step, and every second one a weight sync. Its training itself needs a GPU.
"""

import json
import sys
from collections import defaultdict
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import PartialState
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    RolloutQueueDataset,
    TokenBudgetBatcher,
)

from rolloutmq.trainer.integrations.trl import BusRolloutWorker

BUDGET = 24


def main(
    run_dir: str,
    record: str,
    passes: int,
    *,
    resume: int | None = None,
    save_at: int = 0,
    sequences: int = 8,
    temperature: float = 1.0,
    vocabulary: int = 14,
) -> None:
    PartialState()  # for accelerate's loggers
    worker = BusRolloutWorker(run_dir, sequences=sequences, group_size=4, timeout_s=5.0)
    state = SimpleNamespace(global_step=0, stateful_callbacks={}, is_world_process_zero=True)
    if resume is not None:
        state.global_step = 1
        attributes = {"bus_step": resume}
        state.stateful_callbacks = {"AsyncCallback": {"args": {}, "attributes": attributes}}
    args = SimpleNamespace(output_dir=run_dir, temperature=temperature)
    limits = SimpleNamespace(vocab_size=vocabulary, max_position_embeddings=128)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: limits))
    metrics: dict[str, list[Any]] = defaultdict(list)
    version = [0]
    worker.callback.on_train_begin(args, state, None, model=model)
    worker.start()
    try:
        source = RolloutQueueDataset(
            worker.rollout_buffer,
            lambda: version[0],
            worker.check_health,
            60.0,
            metrics,
            max_staleness=100,
            poll_interval_s=0.1,
        )
        collate = DataCollatorForRollout(0, 1, metrics=metrics, token_budget=BUDGET)
        with Path(record).open("w") as file:
            for number, rows in enumerate(
                islice(iter(TokenBudgetBatcher(source, 1, BUDGET, metrics)), passes), 1
            ):
                batch = collate.torch_call([rows])
                samples = [
                    {name: value if name == "metrics" else _plain(value) for name, value in one.items()}
                    for row in rows
                    for one in row.samples
                ]
                terms = batch["old_log_probs"][0].tolist()
                file.write(json.dumps({"samples": samples, "terms": terms}) + "\n")
                state.global_step = number
                worker.callback.on_step_end(args, state, None)
                if number % 2 == 0:
                    version[0] += 1
                    worker.update_model_version(version[0])
                if number == save_at:
                    Path(run_dir, f"checkpoint-{number}").mkdir()
                    worker.callback.on_save(args, state, None)
        told = {
            "covered": worker.callback.state()["attributes"]["bus_step"],
            "metrics": worker.metrics_queue.qsize(),
        }
    finally:
        worker.stop()
    sys.stdout.write(json.dumps(told) + "\n")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
