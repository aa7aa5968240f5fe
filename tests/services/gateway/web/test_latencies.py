"""The gateway tells how long its requests took, by route and class of status, over real sockets."""

import asyncio

from tests.services.gateway.site import Opened

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.pubsub import Subscriber
from rolloutmq.schemas.wire.latency import Hop, LatencySample

LIMIT_S = 60.0


async def test_requests_are_told_by_route_and_class(site: Opened) -> None:
    wanted = {("/info", "2xx"): 2, ("/scored_data", "4xx"): 1, ("/info", "4xx"): 1, ("other", "4xx"): 2}
    counts: dict[tuple[str, str], int] = {}
    async with site() as one:
        endpoints = read_endpoints(one.layout.root)
        assert endpoints is not None
        async with Subscriber(endpoints.events, [b"telemetry.latency.gateway"]) as events:
            await one.get("/info")
            await one.get("/info")
            await one.post("/scored_data", {"tokens": "none"}, status=422)
            await one.post("/info", {}, status=405)
            for path in ("/never/heard/of", "/id-of-a-user"):
                await one.post(path, {}, status=404)
            async with asyncio.timeout(LIMIT_S):
                while counts != wanted:
                    _, payload = await anext(events)
                    sample = codec.decode_event(payload)
                    assert isinstance(sample, LatencySample)
                    assert sample.host
                    for row in sample.rows:
                        assert row.hop is Hop.HTTP
                        name = row.route, row.status
                        counts[name] = counts.get(name, 0) + row.durations.count
                    assert all(counts[name] <= wanted.get(name, 0) for name in counts), counts
