"""The gateway's own pages: state, health, and documentation of its endpoints. Pure."""

import html
import time
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rolloutmq.schemas.wire.control import StatusReply
from rolloutmq.services.gateway.atropos_wire import EnvIdentifier, RegisterEnv, Registration, ScoredData

if TYPE_CHECKING:
    from rolloutmq.services.gateway.service import Gateway

ENDPOINTS: Final[tuple[tuple[str, str, Any, str], ...]] = (
    ("GET", "/", None, "Confirms that the server is up."),
    ("POST", "/register", Registration, "Starts or resumes a trainer's run."),
    ("POST", "/register-env", RegisterEnv, "Registers an environment, once the trainer has started."),
    ("POST", "/disconnect-env", EnvIdentifier, "Releases the claims of an environment."),
    ("GET", "/wandb_info", None, "Group and project of the run."),
    ("GET", "/info", None, "Batch size and longest sequence; -1 before a trainer has registered."),
    ("GET", "/status", None, "Step and number of queued groups."),
    ("GET", "/status-env", EnvIdentifier, "Pacing information of an environment; also as ?env_id=."),
    ("POST", "/scored_data", ScoredData, "Sends one group. Replies once the broker has it."),
    (
        "POST",
        "/scored_data_list",
        list[ScoredData],
        "Sends several groups; none is accepted if one is invalid.",
    ),
    ("GET", "/batch", None, "Next batch, oldest groups first, or null if there is none."),
    ("GET", "/latest_example", None, "Newest group."),
    ("GET", "/reset_data", None, "Discards the run and its queue."),
    ("GET", "/global-status", None, "Pressure, environments, workers and waits in one reply."),
    ("GET", "/metrics", None, "The same for Prometheus."),
    ("GET", "/health", None, "200 while the broker replies, 503 otherwise."),
    ("GET", "/openapi.json", None, "This page for programs."),
)


def health(gateway: "Gateway", status: StatusReply | None) -> dict[str, Any]:
    """Return whether the gateway is able to serve."""
    if status is None or not gateway.watch.answers:
        return {"status": "no broker"}
    return {"status": "ok", "durability": status.durability, "journal": status.journal.health}


def global_status(gateway: "Gateway", status: StatusReply | None) -> dict[str, Any]:
    """Return the state for tools that scale environments. Times in seconds."""
    now, registry = time.monotonic(), gateway.registry
    queued = gateway.queued(status)
    lanes = {lane.env: lane for lane in status.pressure.lanes} if status is not None else {}
    environments = []
    for env in registry.book.environments:
        lane = lanes.get(env.lane)
        environments.append(
            {
                "env_id": env.env_id,
                "name": env.wandb_name,
                "connected": env in registry.here(),
                "silent_s": round(registry.silent_s(env, now), 3),
                "weight": env.weight,
                "group_size": registry.group_size(env),
                "min_batch_allocation": env.min_share,
                "queued_sequences": queued.get(env.lane, 0),
                "queued_groups": lane.queued_groups if lane else 0,
                "accepted_groups": lane.accepted_groups if lane else 0,
                "groups_per_s": lane.accepted_per_s if lane else 0.0,
                "oldest_age_s": lane.oldest_age_s if lane else 0.0,
                "wait": lane.wait if lane else "",
            }
        )
    answer: dict[str, Any] = {
        "broker": health(gateway, status)["status"],
        "current_step": registry.book.step,
        "batch_size": registry.book.trainer.batch_size if registry.book.trainer else -1,
        "num_connected_envs": len(registry.here()),
        "environments": environments,
    }
    if status is not None:
        pressure = status.pressure
        answer |= {
            "rollout_pressure": pressure.rollout_pressure,
            "queued_sequences": pressure.queued_sequences,
            "queued_groups": pressure.queued_groups,
            "consumed_per_s": pressure.consumed_per_s,
            "produced_per_s": pressure.produced_per_s,
            "trainer_wait": pressure.trainer_wait,
            "ledger": msgspec.structs.asdict(pressure.ledger),
            "workers": [
                {"name": one.worker, "env": one.env, "state": one.state, "in_hand": one.in_hand}
                for one in pressure.workers
            ],
        }
    return answer


@cache
def openapi() -> dict[str, Any]:
    """Return the endpoints in OpenAPI 3.1."""
    bodies = [body for _, _, body, _ in ENDPOINTS if body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for method, path, body, says in ENDPOINTS:
        operation: dict[str, Any] = {"summary": says, "responses": {"200": {"description": "Done."}}}
        if body is not None:
            (schema,), _ = msgspec.json.schema_components([body], ref_template="#/components/schemas/{name}")
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
            operation["responses"]["422"] = {"description": "Invalid body; the reply names the error."}
        paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "RolloutMQ gateway", "version": "1", "description": "Atropos' HTTP interface."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


@cache
def docs() -> str:
    """Return the documentation as one HTML page without external resources."""
    rows = []
    for method, path, body, says in ENDPOINTS:
        fields = _fields(body)
        rows.append(
            f"<tr><td><code>{method}</code></td><td><code>{html.escape(path)}</code></td>"
            f"<td>{html.escape(says)}{fields}</td></tr>"
        )
    return _PAGE.replace("ROWS", "\n".join(rows))


def _fields(body: Any) -> str:
    if body is None:
        return ""
    kind = ScoredData if body == list[ScoredData] else body
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    names = ", ".join(
        f"<b>{field.name}</b>" if field.name in required else field.name
        for field in msgspec.structs.fields(kind)
    )
    many = "a list of " if kind is not body else ""
    return f"<br><small>{many}{names}</small>"


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>RolloutMQ gateway</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #e4e7eb; padding: .4rem .6rem; vertical-align: top }
small { color: #7b8794 }
</style></head><body>
<h1>RolloutMQ gateway</h1>
<p>Atropos' HTTP interface on top of the bus. Bodies and replies are JSON, optionally compressed with gzip; fields in
bold are required. Programs read <a href="openapi.json">openapi.json</a>.</p>
<table>
ROWS
</table></body></html>
"""
