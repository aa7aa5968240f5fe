"""TRL's AsyncGRPOTrainer learns to sort three digits from the bus; `rolloutmq up trl_sort_async.toml` runs beside it.

On a GPU all of it is TRL's, and not yet run. Without one, `cpu_attention` stands in for TRL's kernel.
"""

import sys
from pathlib import Path

import torch
from cpu_attention import without_gpu
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import rolloutmq
from rolloutmq.bus.rundir import load_run
from rolloutmq.trainer.integrations.trl import BusRolloutWorker, BusWeightTransfer
from rolloutmq.trainer.policy.model import build_policy, write_identity

SEQUENCES = 64
GROUP = 16
TOKENS = 1024
"""Those of a step, about 220 sequences with shared beginnings: several batches of the bus."""


def written_model(run_dir: Path) -> Path:
    """Write a model of random weights once; yours is a name of the hub, or a path."""
    run, layout = load_run(run_dir)
    path = layout.root / "trl-model"
    if not (path / "config.json").exists():
        policy = build_policy(run.model, run.run.seed)
        policy.save_pretrained(path)
        write_identity(policy, run.model, path)
    return path


def main(run_dir: Path, steps: int) -> None:
    gpu = torch.cuda.is_available()
    if not gpu:
        without_gpu()
    model = str(written_model(run_dir))
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = AsyncGRPOConfig(
        output_dir=str(run_dir / "trl"),
        max_steps=steps,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        token_budget=TOKENS,
        max_staleness=4,
        weight_sync_steps=1,
        learning_rate=1e-3,
        adam_beta2=0.99,
        save_steps=50,
        logging_steps=20,
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    worker = BusRolloutWorker(run_dir, sequences=SEQUENCES, group_size=GROUP)
    trainer = AsyncGRPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [""]}),  # not used: the workers sample their own tasks
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=BusWeightTransfer(run_dir, model, tokenizer, lambda: worker.version),
        callbacks=[worker.callback],
    )
    before = worker.last_checkpoint(args.output_dir)
    sys.stdout.write(f"continues from {before}\n")
    trainer.train(resume_from_checkpoint=before)
    greedy = rolloutmq.evaluate(run_dir).all.greedy
    sys.stdout.write(
        f"greedy score of held-out tasks after {trainer.state.global_step} steps: {greedy:.3f}\n"
    )


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "runs/trl-sort-async"),
        int(sys.argv[2]) if len(sys.argv) > 2 else 400,
    )
