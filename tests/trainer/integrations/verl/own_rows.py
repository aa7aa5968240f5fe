"""Fields, keys and tags that verl's own agent loop worker writes, beside those of the adapter. In verl's environment.

Its last argument is the group as JSON: columns and size. It ends with 0 if both are the same.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.integrations.verl.prompts import Prompt
from rolloutmq.trainer.integrations.verl.rows import trajectories

FIELDS = {
    "uid": "u", "raw_prompt": [{"role": "user", "content": "7"}], "data_source": "played", "index": 7,
    "global_steps": 5, "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
}  # fmt: skip


async def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Compute neither score nor teacher."""


class Worker:
    """As much of verl's worker as the writing of an output needs."""

    processor = None
    _compute_score = staticmethod(nothing)
    _compute_teacher_logprobs = staticmethod(nothing)
    _compute_position_ids = AgentLoopWorker._compute_position_ids

    def _compute_multi_modal_inputs(self, _output: Any, _input_ids: Any) -> dict[str, Any]:
        return {}


async def theirs(ours: dict[str, Any], session: int) -> SimpleNamespace:
    """Return what verl's own worker puts for one session."""
    put = SimpleNamespace()

    async def record(**given: Any) -> None:
        vars(put).update(given)

    tq.async_kv_batch_put = record
    output = AgentLoopOutput(
        prompt_ids=ours["prompts"].tolist(),
        response_ids=ours["responses"].tolist(),
        response_mask=ours["response_mask"].tolist(),
        response_logprobs=ours["rollout_log_probs"].tolist(),
        reward_score=float(ours["rm_scores"][-1]),
        num_turns=ours["num_turns"],
        metrics=ours["metrics"],
        extra_fields=ours["extra_fields"],
    )
    written = AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess
    await written(Worker(), output, False, session_id=session, **FIELDS)
    return put


async def main(given: dict[str, Any]) -> None:
    group = Group.build(
        "g",
        **given["columns"],
        oldest=PolicyVersion(1, 3),
        newest=PolicyVersion(1, 4),
        started_at=1.0,
        finished_at=3.5,
    )
    found = trajectories(group, Prompt("u", FIELDS, given["size"], 5))
    for session, (key, fields, tag) in enumerate(zip(found.keys, found.fields, found.tags, strict=True)):
        put = await theirs(fields, session)
        assert (put.keys, put.tags, put.partition_id) == ([key], [tag], "train"), (put.keys, put.tags, tag)
        mine = list_of_dict_to_tensordict([fields])
        assert set(mine.keys()) == set(put.fields.keys()), set(mine.keys()) ^ set(put.fields.keys())
        for name in mine.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            one, other = mine.get(name), put.fields.get(name)
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype, name
                assert torch.equal(one, other), name
            else:
                assert one.tolist() == other.tolist(), name


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[-1])))
