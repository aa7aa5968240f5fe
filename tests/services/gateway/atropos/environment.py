"""An environment of Atropos, run by Atropos' interpreter: `python environment.py serve --env.record FILE ...`.

It is a `BaseEnv` as its users write them, and writes down what it posted and what it was answered; nothing of how it
posts is changed. Every group that it builds has a number of its own, which is its first token: when Atropos' client
posts a group again, because it got no answer, it is the same number.
"""

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = 1 << 14
UNKNOWN = "?"
LISTED_EVERY = 10
"""Every so many items make two groups, which go as a list."""
NO_LABEL = -100
PROMPT_LOGPROB = 1.0


class CountingConfig(BaseEnvConfig):  # type: ignore[misc]
    record: str = ""


class Counting(BaseEnv):  # type: ignore[misc]
    """Asks the policy to go on from a number."""

    name = "counting"
    env_config_cls = CountingConfig

    def __init__(self, config: CountingConfig, *args: Any, **options: Any) -> None:
        make_tokenizer(Path(config.tokenizer_name))
        super().__init__(config, *args, **options)
        self.items = 0
        self.groups = 0
        self.record = Path(config.record).open("a", buffering=1)  # noqa: SIM115 - as long as it lives

    @classmethod
    def config_init(cls) -> tuple[CountingConfig, list[APIServerConfig]]:
        config = CountingConfig(wandb_name=cls.name, group_size=4, max_token_length=64, max_num_workers=16)
        return config, [APIServerConfig(model_name="scripted", api_key="none")]

    async def setup(self) -> None:
        """Nothing to load."""

    async def evaluate(self, *args: Any, **options: Any) -> None:
        """Nothing to evaluate."""

    async def get_next_item(self) -> int:
        self.items += 1
        return self.items

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        steps = [await self.collect_group() for _ in range(2 if item % LISTED_EVERY == 0 else 1)]
        return (steps if len(steps) > 1 else steps[0]), []

    async def collect_group(self) -> ScoredDataGroup:
        self.groups += 1
        number = self.groups
        prompt = str(number)
        messages = [{"role": "user", "content": prompt}]
        completion = await self.server.chat_completion(
            messages=messages, n=self.config.group_size, logprobs=True
        )
        prompted = self.tokenizer.encode(prompt)
        group = ScoredDataGroup(
            tokens=[],
            masks=[],
            scores=[],
            inference_logprobs=[],
            messages=[],
            generation_params={"n": number},
        )
        for row, choice in enumerate(completion.choices):
            answered = self.tokenizer.encode(choice.message.content)
            group["tokens"].append(prompted + answered)
            group["masks"].append([NO_LABEL] * len(prompted) + answered)
            group["inference_logprobs"].append(
                [PROMPT_LOGPROB] * len(prompted) + [token.logprob for token in choice.logprobs.content]
            )
            group["messages"].append([*messages, {"role": "assistant", "content": choice.message.content}])
            group["scores"].append(row / self.config.group_size)
        return group

    def _post_json_with_compression(self, session: Any, url: str, payload: Any, **options: Any) -> Any:
        """Post as ever, and write down what came of it."""
        numbers = [one["tokens"][0][0] for one in (payload if isinstance(payload, list) else [payload])]

        @asynccontextmanager
        async def written_down() -> Any:
            self.record.write(json.dumps({"posted": numbers}) + "\n")
            async with super(Counting, self)._post_json_with_compression(
                session, url, payload, **options
            ) as response:
                self.record.write(json.dumps({"answered": numbers, "status": response.status}) + "\n")
                yield response

        return written_down()


def make_tokenizer(where: Path) -> None:
    """Write a tokenizer of which every word is a number."""
    words = {str(number): number for number in range(WORDS)}
    tokenizer = Tokenizer(WordLevel({**words, UNKNOWN: WORDS}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN).save_pretrained(where)


if __name__ == "__main__":
    Counting.cli()
