"""A trainer on the bus, beside the environments of Atropos: `python -m ... RUN_DIR BATCH_SIZE RECORD`.

It pulls as the shipped trainer does, and trains nothing. What it got is written down as Atropos' trainer would get it.
"""

import json
import sys
from pathlib import Path

from rolloutmq import Consumer
from rolloutmq.services.gateway.group_mapping import from_group


def main(run_dir: str, batch_size: str, record: str) -> None:
    """Pull until ended."""
    with (
        Path(record).open("a", buffering=1) as out,
        Consumer.blocking(run_dir, sequences=int(batch_size)) as consumer,
    ):
        for batch in consumer:
            out.write(json.dumps({"batch": [from_group(group) for group in batch.groups]}) + "\n")
            batch.ack()


if __name__ == "__main__":
    main(*sys.argv[1:])
