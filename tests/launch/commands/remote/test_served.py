"""Where an engine of another host listens, and the URL by which others reach it."""

from pathlib import Path

import pytest
from tests.services.http_server.authority import Pair, pair

from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.launch.commands.remote.served import Served
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout

BROKER = "tcp://127.0.0.1:7760"


@pytest.mark.parametrize(
    ("served", "own", "url"),
    [
        (Served(), "http://127.0.0.1:81", "http://127.0.0.1:81"),
        (Served("10.0.0.9", insecure=True), "http://10.0.0.9:81", "http://10.0.0.9:81"),
        (Served("::", insecure=True, advertise="fd00::9"), "http://[::1]:81", "http://[fd00::9]:81"),
        (Served("0.0.0.0", insecure=True), "https://127.0.0.1:81", "https://127.0.0.1:81"),
        (Served(advertise="gpu-9"), "https://127.0.0.1:81/", "https://gpu-9:81"),
    ],
)
def test_others_reach_it_by_the_scheme_of_the_engine(served: Served, own: str, url: str) -> None:
    assert served.url(own, BROKER) == url


def test_the_configuration_gets_its_address_and_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pair(tmp_path / "keys")
    monkeypatch.chdir(tmp_path)
    served = Served(port=81, tls_cert=Path("keys/tls.pem"), tls_key=Path("keys/tls.key"))
    served.check(BROKER)
    config = served.accepting(lambda _data, _layout: RunConfig())(b"", RunLayout(tmp_path))
    assert (config.inference.port, config.run.tls_cert, config.run.tls_key) == (81, made.cert, made.key)
    made.key.unlink()
    with pytest.raises(ConfigError, match=r"^run\.tls_key: .* cannot be read"):
        served.check(BROKER)


def test_a_certificate_that_no_worker_would_accept_is_refused_at_the_start(tmp_path: Path) -> None:
    """It joined, `status` listed it as good, and every worker tried it again and again."""
    made, other = pair(tmp_path / "a", "gpu-9", "10.0.0.9"), pair(tmp_path / "b", "gpu-9")
    ca = made.ca.read_text()

    def refused(made: Pair, ca: str, host: str = "127.0.0.1", advertise: str = "") -> str:
        served = Served(host, advertise=advertise, has_tokens=True, tls_cert=made.cert, tls_key=made.key)
        with pytest.raises(ConfigError) as caught:
            served.check(BROKER, ca)
        return str(caught.value)

    for host in ("10.0.0.9", "127.0.0.1", "0.0.0.0"):  # the last one by the address that reaches the broker
        Served(host, has_tokens=True, tls_cert=made.cert, tls_key=made.key).check(BROKER, ca)
    why = refused(made, ca, "10.0.0.7")
    assert why.startswith("--tls-cert: workers reach the engine as 10.0.0.7, and do not accept ")
    assert "it names gpu-9, 10.0.0.9, " in why
    assert "as gpu-7, " in refused(made, "", "10.0.0.9", "gpu-7"), "whoever signed it"
    assert "as gpu-9, and do not accept" in refused(other, ca, "10.0.0.9", "gpu-9"), "another authority"
    assert "the certificate ended at " in refused(pair(tmp_path / "c", "gpu-9", days=-1 / 24), "", "gpu-9")


def test_half_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--tls-cert: belongs to --tls-key: give both, or none"):
        Served(tls_key=Path("tls.key"))


def test_others_reach_it_only_if_it_asks_for_tokens_or_everybody_may() -> None:
    with pytest.raises(
        ConfigError, match=r"^--host: is within reach .*without --key .*allow it with --insecure"
    ):
        Served("10.0.0.9")
    assert not Served("10.0.0.9", insecure=True).is_clear
    assert Served("10.0.0.9", has_tokens=True).is_clear, "told"
    secured = Served("10.0.0.9", has_tokens=True, tls_cert=Path("c"), tls_key=Path("k"))
    assert not secured.is_clear
    assert not Served(has_tokens=True).is_clear


def test_an_engine_with_a_key_starts_within_reach_of_others(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    accept = Served("10.0.0.9", has_tokens=True).accepting(lambda _data, _layout: RunConfig())
    write_json(layout.config, accept(b"", layout))
    assert load_run(run_dir)[0].inference.host == "10.0.0.9"
