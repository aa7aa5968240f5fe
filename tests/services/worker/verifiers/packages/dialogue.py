"""An environment of verifiers with several turns, that a built-in model can read: `7=`, an answer, `8=`, and so on."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def answered(state: Any) -> float:
    return float(len(state["trajectory"]))


class Dialogue(vf.MultiTurnEnv):  # type: ignore[misc]
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:  # noqa: ARG002 - as theirs
        """Go on. The template of a built-in model marks no turns, so the end of an answer is written out."""
        last = state["trajectory"][-1]
        end = "" if last["is_truncated"] else "<eos>"
        return [{"role": "user", "content": f"{end}{len(state['trajectory'])}="}]


def load_environment(turns: int = 3, rows: int = 10) -> vf.Environment:
    questions = [{"prompt": [{"role": "user", "content": f"{n}="}], "answer": str(n)} for n in range(rows)]
    return Dialogue(
        dataset=Dataset.from_list(questions),
        max_turns=turns,
        rubric=vf.Rubric(funcs=[answered], weights=[0.5]),
    )
