"""Real environments of verifiers, and the policy of a server to roll them out with."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rolloutmq import Group, Policy
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.trajectory import group_of
from rolloutmq.services.worker.verifiers.package import has_tasksets

ROOT: Final = Path(__file__).parents[4]
PACKAGES: Final = Path(__file__).with_name("packages")
TASKSETS: Final = Path(__file__).parent / "tasksets" / "packages"
"""Packages for verifiers 0.4; they have the harness of the example."""
ADDITIONS: Final = ROOT / "examples" / "verifiers_sum" / "verifiers_taskset.toml"
SUMS: Final = ROOT / "examples" / "verifiers_sum" / "verifiers_sum.toml"
DEADLINE_S: Final = 60.0


def missing() -> str:
    """Return why environments of verifiers up to 0.3 cannot run here; empty if they can."""
    return "" if find_spec("verifiers") and not has_tasksets() else "needs verifiers 0.3: make test-verifiers"


def missing_tasksets() -> str:
    """Return why environments of verifiers 0.4 cannot run here; empty if they can."""
    return "" if has_tasksets() else "needs verifiers 0.4: make test-verifiers"


if not missing():
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # the thread that watches its progress bars would outlive the tests


def load(package: str, base_dir: Path = PACKAGES, **section: Any) -> Any:
    """Load the environment of a package as a worker does."""
    return load_environment(package, EnvironmentConfig(verifiers=package, **section), base_dir)


@asynccontextmanager
async def policy_of(*urls: str, patience_s: float = DEADLINE_S) -> AsyncIterator[OpenAIPolicy]:
    """A worker's client of the servers at these addresses, without `/v1`."""
    listed = [InferenceAddress(url=url, pid=0) for url in urls]
    async with OpenAIPolicy.opened(
        Engines(lambda: listed, random.Random(0)), patience_s=patience_s
    ) as policy:
        yield policy


async def rolled_out(environment: Any, policy: Policy, index: int = 0, size: int = 4) -> Group:
    """Roll out one task of an entered environment, as a worker does."""
    return group_of("g", await environment.rollout_at(policy, index, size, random.Random(0)))
