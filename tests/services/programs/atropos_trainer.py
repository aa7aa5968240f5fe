"""The example trainer's client of Atropos, at a pace: `python atropos_trainer.py URL BATCH RECORD PACE`.

The file PACE has the seconds of a step. The first token of each group that was fetched is written down.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

SEQUENCE = 64
FOREVER = 1 << 30


def main(url: str, batch_size: str, record: str, pace: str) -> None:
    """Register, and fetch until ended."""
    # By its path: `trainer` would be the package of that name to a type checker.
    runpy.run_path(str(Path(__file__).parents[1] / "gateway" / "atropos" / "trainer.py"))["stand_in"]()
    from example_trainer import api, data
    from example_trainer.config import TrainingConfig

    config = TrainingConfig(
        model_name="none",
        batch_size=int(batch_size),
        gradient_accumulation_steps=1,
        seq_len=SEQUENCE,
        training_steps=FOREVER,
        atropos_url=url,
    )
    fetch = data.get_batch
    with Path(record).open("a", buffering=1) as out:

        def fetched(**where: str) -> Any:
            answer = fetch(**where)
            for group in answer["batch"] or ():
                out.write(f"{group['tokens'][0][0]}\n")
            return answer

        data.get_batch = fetched
        assert api.check_atropos_api(url)
        api.register_trainer(config)
        while True:
            batches, _ = data.get_data(config.batch_size, config.seq_len, url)
            for _ in batches:
                time.sleep(float(Path(pace).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
