"""State and health of the gateway and its run. Pure."""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from rolloutmq.schemas.wire.control import StatusReply
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.gateway.atropos_replies import UNKNOWN

if TYPE_CHECKING:
    from rolloutmq.services.gateway.service import Gateway


def health(gateway: "Gateway", status: StatusReply | None) -> dict[str, Any]:
    """Return whether the gateway is able to serve."""
    if status is None or not gateway.watch.answers:
        return {"status": "no broker"}
    return {"status": "ok", "durability": status.durability, "journal": status.journal.health}


def _batch_size(gateway: "Gateway", status: StatusReply | None) -> int:
    trainer = gateway.registry.book.trainer
    if trainer is not None:
        return trainer.batch_size
    return (status.pressure.batch_sequences if status is not None else 0) or UNKNOWN


def global_status(gateway: "Gateway", status: StatusReply | None) -> dict[str, Any]:
    """Return the state for tools that scale environments. Times in seconds.

    Whatever only the broker knows is null until it has replied for the first time.
    """
    now, registry = time.monotonic(), gateway.registry
    queued = gateway.queued(status) if status is not None else None
    known = status.pressure.lanes if status is not None else ()
    lanes = {lane.env: lane for lane in known if lane.split is Split.TRAIN}  # clients of the gateway train
    unknown = None if status is None else 0
    here = {env.env_id for env in registry.here()}
    environments = []
    for env in registry.book.environments:
        lane = lanes.get(env.lane)
        environments.append(
            {
                "env_id": env.env_id,
                "name": env.wandb_name,
                "connected": env.env_id in here,
                "silent_s": round(registry.silent_s(env, now), 3),
                "weight": env.weight,
                "group_size": registry.group_size(env),
                "min_batch_allocation": env.min_share,
                "queued_sequences": queued.get(env.lane, 0) if queued is not None else None,
                "queued_groups": lane.queued_groups if lane else unknown,
                "accepted_groups": lane.accepted_groups if lane else unknown,
                "groups_per_s": lane.accepted_per_s if lane else unknown,
                "oldest_age_s": lane.oldest_age_s if lane else unknown,
                "wait": lane.wait if lane else "",
            }
        )
    answer: dict[str, Any] = {
        "broker": health(gateway, status)["status"],
        "current_step": gateway.step(status),
        "batch_size": _batch_size(gateway, status),
        "num_connected_envs": len(here),
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
                {"name": one.worker, "env": one.env, "state": one.counts_as, "in_hand": one.in_hand}
                for one in pressure.workers
            ],
        }
    return answer
