"""How answers travel: compressed for those who ask for it, and not to strange web pages."""

import gzip
import json

import pytest
from tests.services.gateway.atropos.bodies import batch, post, register, start
from tests.services.gateway.atropos.servers import Api

GZIP = {"Accept-Encoding": "gzip, deflate"}


def filled(api: Api, size: int = 400) -> None:
    start(api, batch_size=2)
    row = list(range(size))
    post(api, {"tokens": [row, row], "masks": [row, row], "scores": [0.0, 1.0]})


def test_large_answers_are_compressed_for_who_takes_it(api: Api) -> None:
    filled(api)
    answer = api.get("/batch", GZIP)
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Content-Type"] == "application/json"
    assert json.loads(gzip.decompress(answer.body))["batch"][0]["tokens"][1][399] == 399


@pytest.mark.parametrize("accepted", ["identity", "deflate", "br"])
def test_large_answers_are_plain_for_others(api: Api, accepted: str) -> None:
    filled(api)
    answer = api.get("/batch", {"Accept-Encoding": accepted})
    assert "Content-Encoding" not in answer.headers
    assert answer.json["batch"][0]["scores"] == [0.0, 1.0]


def test_small_answers_are_plain(api: Api) -> None:
    register(api)
    answer = api.get("/info", GZIP)
    assert "Content-Encoding" not in answer.headers
    assert answer.json["batch_size"] == 4


def test_caches_are_told_that_it_depends(api: Api) -> None:
    filled(api)
    assert "accept-encoding" in api.get("/batch", GZIP).headers["Vary"].lower()


def test_the_latest_example_is_compressed_too(api: Api) -> None:
    filled(api)
    answer = api.get("/latest_example", GZIP)
    assert json.loads(gzip.decompress(answer.body))["scores"] == [0.0, 1.0]
    assert batch(api) is not None


@pytest.mark.differs("theirs lets every web page read and write; ours none, unless it is asked to")
def test_web_pages_of_others(api: Api) -> None:
    answer = api.get("/info", {"Origin": "https://example.org"})
    assert ("Access-Control-Allow-Origin" in answer.headers) == api.either(theirs=True, ours=False)
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    answer = api.ask("OPTIONS", "/scored_data", headers=asked)
    assert (answer.status == 200) == api.either(theirs=True, ours=False)
