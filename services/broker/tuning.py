"""Tuning: settings that people change while the run goes on, all that were named together or none.

A change is validated as the configuration is, held against what is known of the groups by now, written down as a fact,
and in force at once. It drops nothing: under a mark that is lower than what is held, nobody is granted anything until
enough is settled. What was changed wins over the configuration, also over that of a later life.
"""

from collections.abc import Mapping

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.control import Setting, SettingStatus, SetValues, ValueRefused, ValuesSet
from rolloutmq.schemas.knobs import KnobError, changed, full, split, value
from rolloutmq.services.broker.journal.facts import Tuned
from rolloutmq.services.broker.state import State


class Tuning:
    """Changes the settings of a living core."""

    def __init__(self, config: RunConfig, state: State) -> None:
        self._configured = config
        self._state = state

    def change(self, request: SetValues, now: float) -> ValuesSet | ValueRefused:
        """Put new values in force, or say which one cannot be, and why."""
        state = self._state
        try:
            asked = {full(key): new for key, new in request.values.items()}
            environments = {split(key)[0] for key in state.tuned} | {lane.env for lane in state.lanes}
            config = changed(state.config, asked, environments)
            values = {key: value(config, key) for key in asked}
            self._require_fit(config, values)
        except KnobError as error:
            return ValueRefused(key=error.key, reason=error.reason)
        state.log.add(Tuned(values))
        self._adopt(config, values, now)
        return ValuesSet(values=values)

    def restore(self, values: Mapping[str, Setting], now: float) -> None:
        """Put in force what an earlier life had; ValueError if the configuration does not allow it any more."""
        environments = {split(key)[0] for key in values}
        try:
            config = changed(self._state.config, values, environments)
        except KnobError as error:
            raise ValueError(str(error)) from None
        self._adopt(config, values, now)

    def differences(self) -> tuple[SettingStatus, ...]:
        """Return what is not as it was configured."""
        return tuple(
            SettingStatus(key=key, configured=before, now=now)
            for key, now in self._state.tuned.items()
            if (before := value(self._configured, key)) != now
        )

    def _adopt(self, config: RunConfig, values: Mapping[str, Setting], now: float) -> None:
        self._state.tuned.update(values)
        self._state.adopt(config, now)

    def _require_fit(self, config: RunConfig, values: Mapping[str, Setting]) -> None:
        """Refuse a mark that cannot hold the groups that there are."""
        state = self._state
        largest = state.admission.largest
        if config.broker.high_bytes < largest:
            reason = f"must hold the largest group that producers may send, {largest} bytes"
            raise KnobError("broker.high_bytes", reason)
        for lane in state.lanes:
            key = f"environment.{lane.env}.high_bytes"
            mark = config.environment[lane.env].high_bytes if key in values else 0
            if not mark:
                continue
            sequences = lane.queued.sequences + lane.leased.sequences
            part = config.part(lane.env) * lane.held_bytes // sequences if sequences else 0
            if mark < max(part, lane.largest_bytes):
                what = "its largest group" if part <= lane.largest_bytes else "its part of a batch"
                raise KnobError(key, f"must hold {what}, {max(part, lane.largest_bytes)} bytes")
