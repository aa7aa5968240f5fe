"""The outlets of all environments: one for each lane, made when its first group comes."""

import asyncio
from collections.abc import Iterator

from rolloutmq.bus.endpoint import Where
from rolloutmq.services.gateway.outlet import Outlet
from rolloutmq.services.gateway.registry import Environment, Registry

NOBODY = "unregistered"
"""Lane of the groups that name no environment."""


class Outlets:
    """Those of one gateway.

    Args:
        where: Run directory.
        registry: Who claims what.
    """

    def __init__(self, where: Where, registry: Registry) -> None:
        self._where = where
        self._registry = registry
        self._by_lane: dict[str, Outlet] = {}

    def __iter__(self) -> Iterator[Outlet]:
        return iter(self._by_lane.values())

    def get(self, lane: str) -> Outlet | None:
        """Return that of a lane, if there is one."""
        return self._by_lane.get(lane)

    def of(self, env: Environment | None) -> Outlet:
        """Return that of an environment, or of those that nobody registered."""
        lane = env.lane if env is not None else NOBODY
        if lane not in self._by_lane:
            self._by_lane[lane] = self._made(env)
        return self._by_lane[lane]

    def _made(self, env: Environment | None) -> Outlet:
        if env is None:
            return Outlet(self._where, NOBODY)
        return Outlet(
            self._where,
            env.lane,
            group_size=env.group_size,
            weight=env.weight,
            max_tokens=env.max_tokens,
            share=lambda: self._registry.share(env),
        )

    def waiting_groups(self) -> int:
        """Return how many groups wait for room."""
        return sum(outlet.waiting()[0] for outlet in self)

    def sequences_since(self, at: float) -> dict[str, int]:
        """Return the sequences that wait for room, or were acked since, by lane."""
        return {lane: outlet.waiting()[1] + outlet.acked_since(at) for lane, outlet in self._by_lane.items()}

    async def close(self) -> None:
        """Close all; the next group opens its own again."""
        async with asyncio.TaskGroup() as tasks:
            for outlet in self:
                tasks.create_task(outlet.close())
