"""TRL's `AsyncGRPOTrainer` learns from the bus, in TRL's own environment: `python async_learner.py RUN_DIR STEPS`.

On a GPU all of it is TRL's. Without one, torch computes the attention of TRL's kernel, FlashAttention 3, and the GPU,
for which TRL looks up a speed, has no name.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

import rolloutmq
from rolloutmq.bus.rundir import load_run
from rolloutmq.trainer.integrations.trl import BusRolloutWorker, BusWeightTransfer
from rolloutmq.trainer.policy.model import build_policy, write_identity

SEQUENCES = 64
GROUP = 16
TOKENS = 1024
"""Those of a step, about 220 sequences with shared beginnings: several batches of the bus."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    _longest_query: int,
    _longest_key: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """FlashAttention's `flash_attn_varlen_func`: a query sees the keys of its segment, up to its place from their end.

    Args:
        query: (N, heads, dimension).
        key: (K, groups of heads, dimension), as `value`.
        query_starts: (S + 1) bounds of the segments, as `key_starts`.
    """
    assert causal
    assert window_size == (-1, -1)
    query_lengths, key_lengths = query_starts.diff(), key_starts.diff()
    segments = torch.arange(len(query_lengths))
    mine, theirs = segments.repeat_interleave(query_lengths), segments.repeat_interleave(key_lengths)
    from_end = query_starts[1:][mine] - torch.arange(len(query))
    keys_from_end = key_starts[1:][theirs] - torch.arange(len(key))
    mask = (mine[:, None] == theirs) & (from_end[:, None] <= keys_from_end)
    q, k, v = (one.transpose(0, 1) for one in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)
    return out.transpose(0, 1)


def without_gpu() -> None:
    """Stand in for what needs a GPU."""
    torch.cuda.get_device_name = lambda device=None: "CPU"  # noqa: ARG005 - its own signature
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)


def main(run_dir: Path, steps: int) -> None:
    gpu = torch.cuda.is_available()
    if not gpu:
        without_gpu()
    run, layout = load_run(run_dir)
    with tempfile.TemporaryDirectory() as model:
        policy: Any = build_policy(run.model, run.run.seed)
        policy.save_pretrained(model)
        write_identity(policy, run.model, Path(model))
        tokenizer = AutoTokenizer.from_pretrained(model)
        worker = BusRolloutWorker(run_dir, sequences=SEQUENCES, group_size=GROUP)
        args = AsyncGRPOConfig(
            output_dir=str(layout.root / "trl"),
            max_steps=steps,
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            token_budget=TOKENS,
            max_staleness=4,
            weight_sync_steps=1,
            learning_rate=1e-3,
            adam_beta2=0.99,
            save_strategy="no",
            logging_steps=20,
            use_cpu=not gpu,
            bf16=gpu,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = AsyncGRPOTrainer(
            model,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=tokenizer,
            rollout_worker=worker,
            weight_transfer=BusWeightTransfer(run_dir, model, tokenizer, lambda: worker.version),
            callbacks=[worker.callback],
        )
        trainer.train()
    told = {"step": trainer.state.global_step, "greedy": rolloutmq.evaluate(run_dir).all.greedy}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
