"""TransferQueue, as the bridge writes it. All calls block."""

from collections.abc import Mapping, Sequence
from typing import Any

from rolloutmq.schemas.errors import ClosedError
from rolloutmq.trainer.integrations.extras import from_extra
from rolloutmq.trainer.integrations.verl.rows import Status

with from_extra("verl"):
    import transfer_queue
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict


class TransferQueueStore:
    """The TransferQueue of this process, which verl has initialized."""

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        fields: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write tags, which join those of the same key, and fields if given.

        Args:
            partition: Partition.
            keys: Keys.
            tags: Tags of each key.
            fields: Fields of each key, all with the same names.

        Raises:
            ClosedError: verl has closed TransferQueue, as it does when its training has ended or raised.
        """
        _require_open()
        values = None if fields is None else list_of_dict_to_tensordict([dict(one) for one in fields])
        transfer_queue.kv_batch_put(
            keys=list(keys), partition_id=partition, tags=[dict(one) for one in tags], fields=values
        )

    def reopen(self, partition: str) -> int:
        """Make restored prompts pending again, so that verl submits them again; return their number.

        verl restores the trajectories of a checkpoint, and the bus delivers their groups again. The bus is the one
        that counts: each of these prompts is answered by its group, once.
        """
        listed = transfer_queue.kv_list(partition) or {}
        over = [
            key
            for key, tag in listed.get(partition, {}).items()
            if tag.get("is_prompt") and tag["status"] in {Status.FINISHED, Status.FAILURE}
        ]
        if over:
            self.put(partition, over, [{"status": str(Status.PENDING)}] * len(over))
        return len(over)


def _require_open() -> None:
    """Raise ClosedError if verl has closed TransferQueue: a call would look for another one, and start a Ray for it."""
    try:
        transfer_queue.get_client()
    except AssertionError:
        raise ClosedError("TransferQueue: closed by verl; its training has ended") from None
