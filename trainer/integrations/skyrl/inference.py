"""`ExternalInference`: what SkyRL asks of its inference engines, when the workers of the bus bring their own.

SkyRL pauses, wakes and updates its engines around each step. Here nothing has to be done: engines of a run read the
weights that the trainer publishes, each between two tokens. What would sample raises `UsageError`, since a generator
other than `BusGenerator` has no engine to ask.
"""

from typing import Any, NoReturn

from rolloutmq.schemas.errors import UsageError
from rolloutmq.trainer.integrations.extras import from_extra

with from_extra("skyrl"):
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface


class ExternalInference(InferenceEngineInterface):  # type: ignore[misc]
    """An inference client without an engine.

    Args:
        model: Name of the model.

    Attributes:
        weight_version: Number of published versions, as SkyRL counts them.
    """

    def __init__(self, model: str = "policy") -> None:
        self.weight_version = 0
        self._model = model

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._model

    def increment_weight_version(self) -> None:
        """Count a published version."""
        self.weight_version += 1

    async def wake_up(self, *_args: Any, **_options: Any) -> None:
        """Do nothing."""

    async def sleep(self, *_args: Any, **_options: Any) -> None:
        """Do nothing."""

    async def pause_generation(self) -> None:
        """Do nothing: workers go on, and engines change weights between two tokens."""

    async def resume_generation(self) -> None:
        """Do nothing."""

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        """Do nothing."""

    async def update_named_weights(self, request: Any) -> None:
        """Do nothing."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Any]:  # noqa: ARG002
        """Do nothing."""
        return {}

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Do nothing."""

    async def finish_session(self, session_id: str) -> None:
        """Do nothing."""

    async def teardown(self) -> None:
        """Do nothing."""

    async def get_world_size(self) -> tuple[int, int]:
        """Return that no inference worker belongs to SkyRL."""
        return 0, 0

    def get_endpoint_url(self) -> str:
        """Raise UsageError."""
        self._refuse("an endpoint")

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:  # noqa: ARG002
        """Raise UsageError."""
        self._refuse("a generation")

    async def chat_completion(self, request_payload: Any) -> Any:  # noqa: ARG002
        """Raise UsageError."""
        self._refuse("a chat completion")

    async def render_chat_completion(self, request_payload: Any) -> Any:  # noqa: ARG002
        """Raise UsageError."""
        self._refuse("a rendered chat")

    async def completion(self, request_payload: Any) -> Any:  # noqa: ARG002
        """Raise UsageError."""
        self._refuse("a completion")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise UsageError(
            f"generator: asked SkyRL's inference client for {what}, and there is none; use BusGenerator"
        )
