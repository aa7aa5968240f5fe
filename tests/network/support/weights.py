"""The trainer's side of streamed weights on a host of its own: a version for each line of standard input.

python -m tests.network.support.weights RUN_DIR
"""

import gc
import sys
from pathlib import Path

import torch

from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare


def main(run_dir: Path) -> None:
    """Share the weights until the input ends."""
    config, layout = load_run(run_dir)
    policy = build_policy(config.model, 0)
    write_identity(policy, config.model, layout.model)
    share = WeightShare.create_or_adopt(
        policy,
        layout.weights,
        version=PolicyVersion(0, 0),
        tokenizer=directory_fingerprint(layout.model),
    )
    print("shared", flush=True)  # noqa: T201 - the test reads it
    for step, _ in enumerate(sys.stdin, start=1):
        with share.writing(PolicyVersion(0, step)), torch.no_grad():
            next(iter(policy.parameters())).add_(0.5)
    share.close(unlink=True)
    del policy, share
    gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
