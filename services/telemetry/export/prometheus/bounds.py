"""The bounds of all labels of the endpoint: they bound its page whatever the size of the run. Pure."""

from dataclasses import dataclass, field
from typing import Final

from rolloutmq.services.telemetry.export.label_bound import LabelBound

ENVIRONMENTS: Final = 100
WORKERS: Final = 100
PROCESSES: Final = 100
ENGINES: Final = 64
HOSTS: Final = 64
GPUS: Final = 256
FIGURES: Final = 128
FINDINGS: Final = 64
REASONS: Final = 64
ROUTES: Final = 64
CHURN_S: Final = 30.0
"""Silence after which a worker or a process gives up its place: their names are not used again."""


@dataclass(slots=True)
class Bounds:
    """The bound of each label, shared by all metrics with it: a name has series of its own in all or in none."""

    env: LabelBound = field(default_factory=lambda: LabelBound(ENVIRONMENTS))
    worker: LabelBound = field(default_factory=lambda: LabelBound(WORKERS, CHURN_S))
    process: LabelBound = field(default_factory=lambda: LabelBound(PROCESSES, CHURN_S))
    engine: LabelBound = field(default_factory=lambda: LabelBound(ENGINES))
    host: LabelBound = field(default_factory=lambda: LabelBound(HOSTS))
    gpu: LabelBound = field(default_factory=lambda: LabelBound(GPUS))
    name: LabelBound = field(default_factory=lambda: LabelBound(FIGURES))
    finding: LabelBound = field(default_factory=lambda: LabelBound(FINDINGS))
    reason: LabelBound = field(default_factory=lambda: LabelBound(REASONS))
    route: LabelBound = field(default_factory=lambda: LabelBound(ROUTES))
