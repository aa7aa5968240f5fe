"""A server of the policy, for an environment that brings a client of its own, such as the one of OpenAI.

The client does the talking: tools, streams, retries. What training needs beside the text is asked for with `request`,
and read from the answers with `completions`: the tokens as they were sampled, and their log-probabilities. A server
that stamps no policy version may have sampled with any since the endpoint was opened: so open one for each
conversation, and not one for each worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.services.worker import dialect
from rolloutmq.services.worker.policy import Completion


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server, for one conversation. Made by `Policy.endpoint`.

    Attributes:
        base_url: What a client of OpenAI wants to have: the address, with `/v1` at its end.
        model: The name under which the policy is served.
        oldest: The policy version that was known at the beginning.
        newest: Returns the newest one heard of.
    """

    base_url: str
    model: str
    oldest: PolicyVersion = PolicyVersion()
    newest: Callable[[], PolicyVersion] = PolicyVersion

    @property
    def request(self) -> Mapping[str, Any]:
        """What every `chat.completions.create` must be called with, in the words of OpenAI's client."""
        return {"model": self.model, "logprobs": True, "extra_body": dialect.BEYOND}

    def completions(self, answer: Any, temperature: float = 1.0) -> list[Completion]:
        """Return what was sampled, a `Completion` for each choice.

        Args:
            answer: A `ChatCompletion` as the client returned it, or the same in dictionaries, or its JSON in bytes.
            temperature: That the client asked for. A server of a run tells it itself, and that counts.

        Raises:
            PolicyRefusedError: It lacks what training needs.
        """
        return dialect.chat_completions(answer, (self.oldest, max(self.oldest, self.newest())), temperature)
