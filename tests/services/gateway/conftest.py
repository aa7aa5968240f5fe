"""A broker with a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.services.gateway.site import Opened, Site, configured, listening

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import running_broker


@pytest.fixture
def site(run_dir: Path) -> Opened:
    """Open a broker, configured by the first argument, with a gateway, configured by the others."""

    @asynccontextmanager
    async def opened(broker: dict[str, Any] | None = None, **gateway: Any) -> AsyncIterator[Site]:
        layout = RunLayout(run_dir)
        config = configured(**(broker or {}))
        write_json(layout.config, config)
        with running_broker(config, layout):
            async with listening(run_dir, **gateway) as one:
                yield one

    return opened
