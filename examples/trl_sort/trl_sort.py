"""TRL's GRPOTrainer learns to sort three digits from groups of the bus; `rolloutmq up trl_sort.toml` runs beside it."""

import sys
from pathlib import Path

from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import rolloutmq
from rolloutmq.bus.rundir import load_run
from rolloutmq.trainer.integrations.trl import BusRollouts
from rolloutmq.trainer.policy.model import build_policy, write_identity


def main(run_dir: Path, steps: int) -> None:
    run, layout = load_run(run_dir)
    policy = build_policy(run.model, run.run.seed)  # yours: AutoModelForCausalLM.from_pretrained(...)
    write_identity(policy, run.model, layout.model)
    args = GRPOConfig(
        output_dir=str(run_dir / "trl"),
        per_device_train_batch_size=256,
        num_generations=16,
        max_steps=steps,
        max_completion_length=4,
        learning_rate=1e-3,
        warmup_steps=10,
        adam_beta2=0.99,
        scale_rewards="none",
        entropy_coef=0.02,
        save_steps=50,
        logging_steps=10,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    with BusRollouts(run_dir) as bus:
        trainer = GRPOTrainer(
            policy,
            args=args,
            processing_class=AutoTokenizer.from_pretrained(layout.model),
            train_dataset=bus.prompts(args),
            rollout_func=bus.rollout,
            reward_funcs=bus.reward,
            callbacks=[bus.callback],
        )
        trainer.train(resume_from_checkpoint=bus.last_checkpoint(args.output_dir))
        greedy = rolloutmq.evaluate(run_dir).all.greedy
        sys.stdout.write(f"greedy score of held-out tasks: {greedy:.3f}\n")


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "runs/trl-sort"),
        int(sys.argv[2]) if len(sys.argv) > 2 else 300,
    )
