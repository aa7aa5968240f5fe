"""Bounds of workers that an operator changed during the run.

The broker keeps the live settings and publishes them in `pressure`. They are applied to the configuration of the run,
so that one taken back leaves the configured value.
"""

import logging
from collections.abc import Mapping

from rolloutmq.schemas.config.live_settings import LiveSettingError, changed
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import Setting

logger = logging.getLogger(__name__)


class LiveBounds:
    """The configuration with the bounds in force.

    Args:
        config: Configuration of the run.

    Attributes:
        settings: Live settings in force, by dotted key.
        config: Configuration with them.
    """

    def __init__(self, config: RunConfig) -> None:
        self.settings: Mapping[str, Setting] = {}
        self.config = self._configured = config
        self._refused: Mapping[str, Setting] | None = None

    def apply(self, settings: Mapping[str, Setting]) -> bool:
        """Put settings in force; return whether anything changed.

        Settings that this configuration does not allow are logged once and change nothing.
        """
        if settings in (self.settings, self._refused):
            return False
        try:
            self.config = changed(self._configured, settings, ())
        except LiveSettingError as error:
            self._refused = settings
            logger.error("live settings not applied error=%s", error)
            return False
        logger.info("live settings applied %s", " ".join(f"{key}={value}" for key, value in settings.items()))
        self.settings = settings
        return True
