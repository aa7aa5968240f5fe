"""A site of environments that keep a pace, on servers that feed so much at most: it drives the detector."""

from collections.abc import Mapping
from typing import Final

from rolloutmq.services.orchestrator.autoscaling.pressure import ServerLimit
from rolloutmq.services.orchestrator.autoscaling.servers.progress import Sampled
from rolloutmq.services.orchestrator.autoscaling.servers.saturation import SaturationDetector
from rolloutmq.services.orchestrator.autoscaling.servers.server_use import ServerUse

SHOWN_S: Final = 60
"""Time in which any workers have shown how fast they are."""


class Site:
    """Workers that make `paces` each, and at most `shared` together."""

    def __init__(self, shared: float, paces: Mapping[str, float] | None = None) -> None:
        self.shared = shared
        self.paces = dict(paces or {"a": 2.0})
        self.engines = 1
        self.rollout_s = 0.0
        self.dispersion = 0.24
        """They make exactly their paces, but this is the least of which a measurement takes `GROUPS`."""
        self.turns = 0
        """Completions of a sequence; each has a token."""
        self.delivering: dict[str, int] = {}
        """Workers whose rollouts arrive, where not all do."""
        self.running_s = dict.fromkeys(self.paces, 0.0)
        self.completions = dict.fromkeys(self.paces, 0.0)
        self.now = 0.0
        self.detector = SaturationDetector()
        self.totals = {env: (0.0, 0.0) for env in self.paces}
        self.weights: dict[str, float] = {}
        self.wants: dict[str, float] = {}
        self.demand: float | None = None

    def run(self, seconds: int, *, available: float = 1.0, **workers: int) -> dict[str, ServerLimit]:
        """Let so many workers of each environment run; without other `wants`, they want as many as they can get."""
        uses: list[ServerUse] = []
        for _ in range(seconds):
            self.now += 1.0
            alone = {env: available * number * self.paces[env] for env, number in workers.items()}
            part = min(1.0, self.shared / sum(alone.values()))
            uses = []
            for env, number in workers.items():
                self.running_s[env] += number
                self.completions[env] += self.turns * part * alone[env]
                there = self.delivering.get(env, number)
                made, busy_s = self.totals[env]
                made = made + part * alone[env] * there / number
                busy_s += available * there
                self.totals[env] = made, busy_s
                pace, weight = part * self.paces[env], self.weights.get(env, 1.0)
                uses.append(
                    ServerUse(
                        env,
                        there,
                        made,
                        busy_s,
                        busy_s,
                        self.now,
                        pace,
                        self.rollout_s,
                        weight=weight,
                        want=self.wants.get(env, 500.0),
                        available=available,
                        demand=self.demand,
                        sampled=Sampled(
                            number,
                            1,
                            1,
                            self.running_s[env],
                            int(self.completions[env]),
                            int(self.completions[env]),
                        ),
                        dispersion=self.dispersion,
                    )
                )
            self.detector = self.detector.looked(uses, self.engines, self.now)
        return {use.env: self.detector.limit(use, uses) for use in uses}

    def grow(self, most: Mapping[str, int], rounds: int = 12) -> dict[str, int]:
        """Let each environment grow as far as it may, and no further than `most`; return its workers."""
        workers = dict.fromkeys(most, 1)
        for _ in range(rounds):
            limits = self.run(SHOWN_S, **workers)
            workers = {
                env: min(limit.most or limit.reach, limit.reach, most[env]) for env, limit in limits.items()
            }
        return workers
