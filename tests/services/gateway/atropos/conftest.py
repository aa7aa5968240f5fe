"""Every statement is made of both servers: Atropos' own (marker `rival`), and the gateway, in plain `make test`.

Where they differ on purpose the test says so, `@pytest.mark.differs("why")`, and asserts what either does with
`api.either(theirs=..., ours=...)`; nothing else may. `pytest -m differs --collect-only -q` lists them all.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.services.gateway.atropos import servers
from tests.services.gateway.atropos.servers import Api, Side

from benchmarks.queues import atropos

THEIRS = pytest.param(
    "theirs",
    marks=[pytest.mark.rival, pytest.mark.skipif(bool(atropos.missing()), reason=atropos.missing())],
)


@pytest.fixture(scope="session", params=[THEIRS, "ours"])
def side(request: pytest.FixtureRequest) -> Side:
    """Whose server."""
    found: Side = request.param
    return found


@contextmanager
def served(side: Side, factory: pytest.TempPathFactory) -> Iterator[str]:
    if side == "theirs":
        with servers.their_server() as url:
            yield url
    else:
        run_dir = factory.mktemp("gateway")
        with servers.our_server(run_dir, "--port", "0", "--set", "broker.durability=memory") as (url, _):
            yield url


@pytest.fixture(scope="session")
def server(side: Side, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that all tests share."""
    with served(side, tmp_path_factory) as url:
        yield url


@pytest.fixture(scope="module")
def untouched(side: Side, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server at which nobody registers."""
    with served(side, tmp_path_factory) as url:
        yield url


def _api(request: pytest.FixtureRequest, side: Side, url: str) -> Iterator[Api]:
    marker = request.node.get_closest_marker("differs")
    api = Api(side, url, marker and marker.args[0])
    yield api
    assert api.differed == bool(marker), "a test marked `differs` asserts what either server does"


@pytest.fixture
def new(request: pytest.FixtureRequest, side: Side, untouched: str) -> Iterator[Api]:
    """A server at which nobody registered."""
    yield from _api(request, side, untouched)


@pytest.fixture
def api(request: pytest.FixtureRequest, side: Side, server: str) -> Iterator[Api]:
    """A server whose data were reset."""
    Api(side, server).get("/reset_data")
    yield from _api(request, side, server)
