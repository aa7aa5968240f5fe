"""From a configuration to the processes of a run. Pure: nothing is started, nothing is looked up.

The workers are not here, and no engine but the first: the orchestrator starts them, as many as are wanted.
"""

from collections.abc import Sequence
from typing import Final

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role

STOP_ORDER: Final[Sequence[frozenset[Role]]] = (
    frozenset({Role.TRAINER, Role.ORCHESTRATOR, Role.GATEWAY}),
    frozenset({Role.INFERENCE}),
    frozenset({Role.BROKER}),
    frozenset({Role.TELEMETRY}),
)
"""Who ends together, first to last. The orchestrator takes its workers with it, and they flush what they have into a
broker that still lives; what is queued then is saved by the broker; telemetry sees it all."""

_COMMANDS: Final = {Role.GATEWAY: "serve-gateway"}
"""Where the command of a service is not called as its role is."""


def plan(config: RunConfig, layout: RunLayout, python: str) -> list[ProcessSpec]:
    """List the processes that the launcher starts and keeps, in the order of their start.

    Args:
        config: The resolved configuration.
        layout: The run directory.
        python: Interpreter of the processes.
    """
    roles = [Role.BROKER, Role.TELEMETRY]
    if config.trainer.enabled:
        roles.append(Role.TRAINER)
    if config.inference.kind == "tiny":
        roles.append(Role.INFERENCE)
    if config.gateway.enabled and config.gateway.listen:
        roles.append(Role.GATEWAY)
    if config.orchestrator.enabled and (config.environment or config.inference.max_engines > 1):
        roles.append(Role.ORCHESTRATOR)
    return [_service(role, layout, python) for role in roles]


def _service(role: Role, layout: RunLayout, python: str) -> ProcessSpec:
    return ProcessSpec(
        name=role.value,
        role=role,
        argv=(
            *(python, "-m", "rolloutmq.launch.cli", _COMMANDS.get(role, role.value)),
            *("--run-dir", str(layout.root)),
        ),
        log=str(layout.log(role.value)),
    )
