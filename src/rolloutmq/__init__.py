"""RolloutMQ: the message bus for LLM reinforcement learning.

The public names are loaded on first use, so that `import rolloutmq` costs nothing and never pulls in
torch, a socket or a service.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolloutmq.bus.batch import Batch
    from rolloutmq.bus.blockingproducer import BlockingProducer
    from rolloutmq.bus.consumer import BlockingConsumer, Consumer
    from rolloutmq.bus.producer import Producer
    from rolloutmq.bus.tasks import BlockingTaskClient, Task, TaskClient
    from rolloutmq.schemas.trajectory import Column, Group
    from rolloutmq.services.worker.endpoint import Endpoint
    from rolloutmq.services.worker.environment import Environment, SingleTurn
    from rolloutmq.services.worker.policy import Completion, Policy
    from rolloutmq.services.worker.trajectory import Trajectory

__version__ = "0.1.0"

_HOME_OF = {
    "Batch": "rolloutmq.bus.batch",
    "BlockingConsumer": "rolloutmq.bus.consumer",
    "BlockingProducer": "rolloutmq.bus.blockingproducer",
    "BlockingTaskClient": "rolloutmq.bus.tasks",
    "Column": "rolloutmq.schemas.trajectory",
    "Completion": "rolloutmq.services.worker.policy",
    "Consumer": "rolloutmq.bus.consumer",
    "Endpoint": "rolloutmq.services.worker.endpoint",
    "Environment": "rolloutmq.services.worker.environment",
    "Group": "rolloutmq.schemas.trajectory",
    "Policy": "rolloutmq.services.worker.policy",
    "Producer": "rolloutmq.bus.producer",
    "SingleTurn": "rolloutmq.services.worker.environment",
    "Task": "rolloutmq.bus.tasks",
    "TaskClient": "rolloutmq.bus.tasks",
    "Trajectory": "rolloutmq.services.worker.trajectory",
}

__all__ = [
    "Batch",
    "BlockingConsumer",
    "BlockingProducer",
    "BlockingTaskClient",
    "Column",
    "Completion",
    "Consumer",
    "Endpoint",
    "Environment",
    "Group",
    "Policy",
    "Producer",
    "SingleTurn",
    "Task",
    "TaskClient",
    "Trajectory",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'rolloutmq' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
