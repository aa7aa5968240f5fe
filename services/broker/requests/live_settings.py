"""Live settings: changes of the configuration of a live run, all named ones or none.

A change is validated like the configuration, checked against the groups in the queues, recorded as an event, and in
force at once. It drops no group: below a lowered mark nothing is granted until enough is settled. A live setting wins
over the configuration, also in later lives of the broker.
"""

from collections.abc import Mapping

from rolloutmq.schemas.config.live_settings import (
    LiveSettingError,
    changed,
    full,
    require_workers,
    split,
    value,
)
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import Setting, SettingStatus, SetValues, ValueRefused, ValuesSet
from rolloutmq.services.broker.broker_state import BrokerState
from rolloutmq.services.broker.journal.format.events import Tuned


class LiveSettings:
    """Changes the settings of a live core."""

    def __init__(self, config: RunConfig, state: BrokerState) -> None:
        self._configured = config
        self._state = state

    def change(self, request: SetValues, now: float) -> ValuesSet | ValueRefused:
        """Put new values in force, or return the first one refused, and why."""
        state = self._state
        try:
            asked = {full(key): new for key, new in request.values.items()}
            for key in asked:
                require_workers(self._configured, key)
            environments = {split(key).env for key in state.changed_settings} | {
                lane.env for lane in state.lanes
            }
            config = changed(state.config, asked, environments)
            values = {key: value(config, key) for key in asked}
            self._require_fit(config, values)
        except LiveSettingError as error:
            return ValueRefused(key=error.key, reason=error.reason)
        state.events.add(Tuned(values))
        self._adopt(config, values, now)
        return ValuesSet(values=values)

    def restore(self, values: Mapping[str, Setting], now: float) -> None:
        """Put the settings of an earlier life in force; ValueError if the configuration no longer allows them."""
        environments = {split(key).env for key in values}
        try:
            config = changed(self._state.config, values, environments)
        except LiveSettingError as error:
            raise ValueError(str(error)) from None
        self._adopt(config, values, now)

    def differences(self) -> tuple[SettingStatus, ...]:
        """Return the settings that differ from the configuration."""
        return tuple(
            SettingStatus(key=key, configured=before, now=now)
            for key, now in self._state.changed_settings.items()
            if (before := value(self._configured, key)) != now
        )

    def of_orchestrator(self) -> dict[str, Setting]:
        """Return the changed settings that the orchestrator applies."""
        return {key: now for key, now in self._state.changed_settings.items() if split(key).of_orchestrator}

    def _adopt(self, config: RunConfig, values: Mapping[str, Setting], now: float) -> None:
        self._state.changed_settings.update(values)
        self._state.adopt(config, now)

    def _require_fit(self, config: RunConfig, values: Mapping[str, Setting]) -> None:
        """Refuse a mark that cannot hold the present groups."""
        state = self._state
        largest = state.credits.largest
        if config.broker.high_bytes < largest:
            reason = f"must hold the largest group that producers may send, {largest} bytes"
            raise LiveSettingError("broker.high_bytes", reason)
        for lane in state.lanes:
            key = f"environment.{lane.env}.high_bytes"
            mark = config.environment[lane.env].high_bytes if key in values else 0
            if not mark:
                continue
            sequences = lane.queued.sequences + lane.leased.sequences
            part = config.part(lane.env) * lane.held_bytes // sequences if sequences else 0
            if mark < max(part, lane.largest_bytes):
                what = "its largest group" if part <= lane.largest_bytes else "its part of a batch"
                raise LiveSettingError(key, f"must hold {what}, {max(part, lane.largest_bytes)} bytes")
