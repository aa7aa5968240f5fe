"""The plan: the processes that the launcher starts for a configuration. Pure: it starts and looks up nothing.

Workers, and engines but the first, are not in the plan: the orchestrator starts and scales them.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role, python_command

STOP_ORDER: Final[Sequence[frozenset[Role]]] = (
    frozenset({Role.TRAINER, Role.ORCHESTRATOR, Role.CURRICULUM}),
    frozenset({Role.CLUSTER, Role.GATEWAY, Role.INFERENCE, Role.RELAY, Role.TEACHER}),
    frozenset({Role.BROKER}),
    frozenset({Role.TELEMETRY}),
)
"""Groups of roles that end together, first to last. The orchestrator ends its workers, and they flush into a running
broker, programs through a running gateway. The broker saves its queues after them. Telemetry, the last to end, records
all of it."""

_COMMANDS: Final = {Role.GATEWAY: "serve-gateway"}
"""Commands with a name other than their role's."""


def plan(config: RunConfig, layout: RunLayout, python: str) -> list[ProcessSpec]:
    """Return the processes that the launcher starts and restarts, in start order.

    Args:
        config: The resolved configuration.
        layout: The run directory.
        python: Interpreter that runs the processes.
    """
    roles = [Role.BROKER, Role.TELEMETRY]
    if config.trainer.enabled:
        roles.append(Role.TRAINER)
    if config.weights.backend == "stream":
        roles.append(Role.RELAY)
    if config.inference.kind in {"tiny", "vllm"}:
        roles.append(Role.INFERENCE)
    if config.teacher.path:
        roles.append(Role.TEACHER)
    if config.curriculum:
        roles.append(Role.CURRICULUM)
    if config.gateway.enabled and config.gateway.listen:
        roles.append(Role.GATEWAY)
    if config.orchestrator.enabled and (config.environment or config.inference.max_engines > 1):
        roles.append(Role.ORCHESTRATOR)
    places = bool(config.environment) or config.places_engines or config.cluster.reserves
    if config.cluster.engine != "local" and places:
        roles.append(Role.CLUSTER)
    further = [_rank(number, layout, python) for number in range(1, config.trainer.ranks)]
    services = [_service(role, layout, python) for role in roles]
    ranks = {"crew": Role.TRAINER.value, "crew_patience_s": config.trainer.rank_patience_s}
    return [
        msgspec.structs.replace(spec, **ranks) if spec.role is Role.TRAINER else spec
        for spec in (*services, *(further if config.trainer.enabled else ()))
    ]


def _rank(number: int, layout: RunLayout, python: str) -> ProcessSpec:
    """Return one more rank of the trainer; the trainer itself is the first."""
    first = _service(Role.TRAINER, layout, python)
    name = f"{first.name}.rank{number}"
    argv = (*first.argv, "--rank", str(number))
    return msgspec.structs.replace(first, name=name, argv=argv, log=str(layout.log(name)))


def _service(role: Role, layout: RunLayout, python: str) -> ProcessSpec:
    return ProcessSpec(
        name=role.value,
        role=role,
        argv=python_command(
            python,
            "rolloutmq.launch.service_process",
            *(_COMMANDS.get(role, role.value), "--run-dir", str(layout.root)),
        ),
        log=str(layout.log(role.value)),
        spare=role is Role.GATEWAY,
        observer=role is Role.TELEMETRY,
    )
