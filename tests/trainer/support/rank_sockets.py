"""One of two ranks as a process that says where it listens: `python -m tests.trainer.support.rank_sockets DIR RANK`."""

import sys
from pathlib import Path

import psutil

from rolloutmq.bus.rundir import write_json
from rolloutmq.trainer.ranks import met

PATIENCE_S = 120.0


def listens_at() -> list[str]:
    found = psutil.Process().net_connections("inet")
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]


def main(root: str, rank: str) -> None:
    with met(Path(root) / "ranks.json", int(rank), 2, PATIENCE_S) as ranks:
        ranks.sums(1)  # now every rank is connected to the other
        write_json(Path(root) / f"rank{rank}.listens", listens_at())
        ranks.sums(1)  # and stays until the other has looked


if __name__ == "__main__":
    main(*sys.argv[1:])
