"""Policy and weights of a run, for a trainer of one's own: the model of `[model]`, shared with the run's engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.errors import MissingError, install_remedy
from rolloutmq.schemas.wire.envelope import PolicyVersion

try:
    from rolloutmq.trainer.policy.model import Policy, build_policy, write_identity
    from rolloutmq.trainer.weights.backends import owned
    from rolloutmq.trainer.weights.share import Source, Writable
except (
    ModuleNotFoundError
) as error:  # these two names are public, and most of the package works without torch
    raise MissingError(f"the package {error.name}", install_remedy("trainer")) from None


def run_policy(run_dir: str | Path) -> Policy:
    """Build the model of a run on the CPU, in evaluation mode: without dropout, with gradients.

    It is a causal language model of transformers, loaded from `model.path` or built from `[model]` with the weights of
    `run.seed`: the same configuration and seed give the same weights.

    Args:
        run_dir: Run directory; `rolloutmq up` has written its configuration.

    Raises:
        MissingError: The directory holds no run yet.
        ConfigError: Its configuration is invalid, or `model.path` holds no model.
    """
    config, _ = load_run(Path(run_dir))
    return build_policy(config.model, config.run.seed)


@contextmanager
def share_weights(
    run_dir: str | Path,
    policy: Policy,
    version: PolicyVersion = PolicyVersion(),
    *,
    source: Source | None = None,
) -> Iterator[Writable]:
    """Share the weights of a policy with the engines of a run, by the run's `weights.backend`, while the block lasts.

    Make the optimizer inside the block: sharing replaces the parameters of the policy. Change them inside of
    `weights.writing(version)`, where `version` is the policy after the step; at its end the engines have the new
    weights, or will get them. A trainer that starts after a killed one takes its shared memory over.

    Args:
        run_dir: Run directory; `rolloutmq up` has written its configuration.
        policy: A causal language model of transformers, as `run_policy` builds it.
        version: Version of its weights now.
        source: Yields tensors to share instead of the policy's own, for sharded or wrapped modules; not with the
            backend `cuda_ipc`.

    Raises:
        MissingError: The directory holds no run yet.
        SegmentInUseError: Another trainer shares its weights here.
        ConfigError: The configuration is invalid, or the backend takes no source.
    """
    config, layout = load_run(Path(run_dir))
    write_identity(policy, config.model, layout.model)
    with owned(policy, config, layout, version, source) as share:
        yield share
