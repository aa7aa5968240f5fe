"""A loop of the control law: one controller, a trainer and workers that keep a pace."""

from typing import Any

from msgspec.structs import replace

from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.autoscaling.control_law import ControllerState, PressureController
from rolloutmq.services.orchestrator.autoscaling.pressure import (
    Decision,
    PressureSample,
    ServerLimit,
    WorkerCounts,
)
from rolloutmq.services.orchestrator.autoscaling.servers.saturation import SaturationDetector
from rolloutmq.services.orchestrator.autoscaling.servers.server_use import ServerUse

LAW = PressureController(1, 50, ScalingConfig())


class Loop:
    """A controller that is asked once a second, of a trainer and workers that keep a pace."""

    def __init__(self, law: PressureController = LAW, workers: int = 10) -> None:
        self.law = law
        self.state: ControllerState = self.law.initial(workers)
        self.now = 1000.0
        self.sample = PressureSample(
            crew=WorkerCounts(ready=workers), pressure=1.5, batch_sequences=60, slots=2
        )
        self.last = Decision(workers, "")
        self.saturation = SaturationDetector()

    def tick(
        self, seconds: int = 1, *, eats: float = 20.0, per_worker: float = 2.0, **changes: Any
    ) -> Decision:
        for _ in range(seconds):
            self.now += 1.0
            before = self.sample
            self.sample = replace(
                before,
                heard_at=self.now,
                number=before.number + 1,
                eaten=before.eaten + round(eats),
                made=before.made + round(per_worker * before.crew.ready),
                **changes,
            )
            if "server" not in changes:
                self.sample = replace(self.sample, server=self._server())
            self.state, self.last = self.law.decide(self.state, self.sample, self.now)
        return self.last

    def _server(self) -> ServerLimit:
        rates = self.state.rates
        use = ServerUse(
            "e",
            rates.delivering,
            rates.made_all,
            rates.busy_all_s,
            rates.present_all_s,
            rates.counted_s,
            rates.per_worker,
            rates.rollout_s,
            self.sample.group_sequences,
        )
        self.saturation = self.saturation.looked([use], self.sample.engines, self.now)
        return self.saturation.limit(use, [use])

    def follow(self) -> None:
        """Have as many workers as it wants."""
        self.sample = replace(self.sample, crew=WorkerCounts(ready=self.last.target))
