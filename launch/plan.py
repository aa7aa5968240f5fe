"""From a configuration to the processes of a run. Pure: nothing is started, nothing is looked up.

The workers are not here, and no engine but the first: the orchestrator starts them, as many as are wanted.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role

STOP_ORDER: Final[Sequence[frozenset[Role]]] = (
    frozenset({Role.TRAINER, Role.ORCHESTRATOR, Role.GATEWAY}),
    frozenset({Role.INFERENCE, Role.TEACHER}),
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
    if config.inference.kind in {"tiny", "vllm"}:
        roles.append(Role.INFERENCE)
    if config.teacher.path:
        roles.append(Role.TEACHER)
    if config.gateway.enabled and config.gateway.listen:
        roles.append(Role.GATEWAY)
    if config.orchestrator.enabled and (config.environment or config.inference.max_engines > 1):
        roles.append(Role.ORCHESTRATOR)
    further = [_rank(number, layout, python) for number in range(1, config.trainer.ranks)]
    services = [_service(role, layout, python) for role in roles]
    ranks = {"crew": Role.TRAINER.value, "crew_patience_s": config.trainer.rank_patience_s}
    return [
        msgspec.structs.replace(spec, **ranks) if spec.role is Role.TRAINER else spec
        for spec in (*services, *(further if config.trainer.enabled else ()))
    ]


def _rank(number: int, layout: RunLayout, python: str) -> ProcessSpec:
    """One more rank of the trainer; the first is the trainer itself."""
    first = _service(Role.TRAINER, layout, python)
    name = f"{first.name}.rank{number}"
    argv = (*first.argv, "--rank", str(number))
    return msgspec.structs.replace(first, name=name, argv=argv, log=str(layout.log(name)))


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
