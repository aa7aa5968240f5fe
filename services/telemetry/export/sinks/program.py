"""The process of one sink: `python -P -m rolloutmq.services.telemetry.export.sinks.program NAME RUN_DIR`.

It reads points from its input until that is closed, hands them to the tracker, and tells the outcome of each. The end
of the input is its only end: a signal that ends the run comes before the last points.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.telemetry.export.sinks.points import Point
from rolloutmq.services.telemetry.export.sinks.protocol import Told, line_of, point_decoder

WHY_LIMIT: Final = 300
"""Longest reason, in characters."""


class Tracker(Protocol):
    """A run of an experiment tracker. Every call may block and may raise."""

    def log(self, point: Point) -> None:
        """Record a point."""
        ...

    def finish(self) -> None:
        """Upload the rest."""
        ...


Open = Callable[[RunConfig, RunLayout], Tracker]


def _wandb(config: RunConfig, layout: RunLayout) -> Tracker:
    from rolloutmq.services.telemetry.export.sinks.wandb_run import WandbRun

    return WandbRun(config, layout)


def _tensorboard(config: RunConfig, layout: RunLayout) -> Tracker:
    from rolloutmq.services.telemetry.export.sinks.tensorboard_writer import TensorboardWriter

    return TensorboardWriter(config, layout)


def _mlflow(config: RunConfig, layout: RunLayout) -> Tracker:
    from rolloutmq.services.telemetry.export.sinks.mlflow_run import MlflowRun

    return MlflowRun(config, layout)


TRACKERS: Final[dict[str, Open]] = {"wandb": _wandb, "tensorboard": _tensorboard, "mlflow": _mlflow}


def serve(tracker: Tracker, points: BinaryIO, told: BinaryIO) -> None:
    """Hand on points until there are no more, then finish."""
    for line in points:
        why = ""
        try:
            tracker.log(point_decoder.decode(line))
        except Exception as error:  # noqa: BLE001 - the border to the library: it costs this point
            why = _why(error)
        told.write(line_of(Told(why)))
        told.flush()
    tracker.finish()


def _why(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:WHY_LIMIT]


def main(name: str, run_dir: Path) -> int:
    """Serve one sink; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # What a library prints must not get between the outcomes: its output goes to the log of telemetry.
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        tracker = TRACKERS[name](*load_run(run_dir))
        serve(tracker, sys.stdin.buffer, told)
    except Exception as error:  # noqa: BLE001 - the task boundary of the process
        sys.stderr.write(f"sink failed sink={name} error={_why(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
