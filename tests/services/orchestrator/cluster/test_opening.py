"""What `up` adds for the nodes of a cluster: an address that they reach, and a key that does not outlive the run."""

import importlib.util
from pathlib import Path

import pytest

from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.bus.transport.keys.certificates import CA, make_certificate
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.config.orchestrator import ClusterConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, PackageMissingError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.orchestrator.cluster import opening
from rolloutmq.services.orchestrator.cluster.messages import Held, Hold
from rolloutmq.services.orchestrator.cluster.opening import closed, namespace_of, opened, reached_at, reserved
from rolloutmq.services.orchestrator.cluster.probe import Probe

FOUND = Probe(host="10.0.0.1")


def config(tmp_path: Path, listen: str = "") -> RunConfig:
    KeyDirectory.create(tmp_path / "keys")
    broker = {"listen": listen, "keys": str(tmp_path / "keys")}
    return RunConfig.model_validate({"base_dir": tmp_path, "cluster": {"engine": "ray"}, "broker": broker})


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    made.root.mkdir(mode=0o700)
    return made


def revoked(tmp_path: Path) -> dict[str, bool]:
    return {key.name: key.revoked is not None for key in KeyDirectory(tmp_path / "keys").records()}


def test_a_wildcard_stands_for_the_host_that_the_nodes_know(tmp_path: Path, layout: RunLayout) -> None:
    made = opened(config(tmp_path, "tcp://0.0.0.0:7760"), layout, "a", FOUND)
    assert made.broker.listen == "tcp://0.0.0.0:7760"
    assert reached_at(made) == "tcp://10.0.0.1:7760"


@pytest.mark.parametrize("listen", ["tcp://10.0.0.1:0", "tcp://127.0.0.1:7760"])
def test_a_listener_out_of_reach_is_refused(tmp_path: Path, layout: RunLayout, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"broker\.listen: the nodes of the cluster do not reach it"):
        opened(config(tmp_path, listen), layout, "a", FOUND)


def test_the_key_is_revoked_at_the_end_and_after_a_kill(tmp_path: Path, layout: RunLayout) -> None:
    given = config(tmp_path, "tcp://10.0.0.1:7760")
    opened(given, layout, "killed", FOUND)
    made = opened(given, layout, "next", FOUND)
    assert revoked(tmp_path) == {"cluster-killed": True, "cluster-next": False}
    closed(made, layout, "next")
    assert revoked(tmp_path) == {"cluster-killed": True, "cluster-next": True}
    assert not layout.cluster_key.exists()


@pytest.mark.parametrize(
    ("section", "host"), [({"command": ["x"]}, "10.0.0.1"), ({"entry": "e.py:E"}, "127.0.0.1")]
)
def test_the_gateway_is_in_reach_of_programs_alone(
    tmp_path: Path, layout: RunLayout, section: dict[str, object], host: str
) -> None:
    tree = config(tmp_path, "tcp://10.0.0.1:7760").model_dump()
    tree |= {"environment": {"e": section}, "gateway": {"enabled": True}}
    assert opened(RunConfig.model_validate(tree), layout, "a", FOUND).gateway.host == host


def test_the_nodes_trust_what_the_run_trusts(tmp_path: Path, layout: RunLayout) -> None:
    tree = config(tmp_path, "tcp://10.0.0.1:7760").model_dump()
    tree["run"] |= {"tls_cert": "tls.pem", "tls_key": "tls.key", "tls_ca": "ca.pem"}
    given = RunConfig.model_validate(tree)
    with pytest.raises(ConfigError, match=r"run\.tls_ca: cannot be read"):
        opened(given, layout, "a", FOUND)
    make_certificate(tmp_path / "keys", ["10.0.0.1"])
    (tmp_path / "ca.pem").write_bytes((tmp_path / "keys" / CA).read_bytes())
    opened(given, layout, "b", FOUND)
    assert load_bundle(layout.cluster_key).ca == (tmp_path / "ca.pem").read_text()


def engines(tmp_path: Path, **sections: object) -> RunConfig:
    tree = config(tmp_path, "tcp://10.0.0.1:7760").model_dump()
    return RunConfig.model_validate({**tree, "inference": {"max_engines": 2}, **sections})


def test_engines_on_nodes_get_a_stream_of_weights_and_a_key(tmp_path: Path, layout: RunLayout) -> None:
    made = opened(engines(tmp_path), layout, "a", FOUND)
    assert (made.weights.backend, made.weights.listen) == ("stream", "tcp://10.0.0.1:0")
    assert load_bundle(layout.cluster_engine_key).role is Role.ENGINE
    assert revoked(tmp_path) == {"cluster-a": False, "cluster-engine-a": False}
    closed(made, layout, "a")
    assert revoked(tmp_path) == {"cluster-a": True, "cluster-engine-a": True}
    assert not layout.cluster_engine_key.exists()


def test_a_run_whose_engines_stay_on_its_host_keeps_its_weights_there(
    tmp_path: Path, layout: RunLayout
) -> None:
    given = engines(tmp_path, cluster={"engine": "ray", "place_engines": False})
    assert opened(given, layout, "a", FOUND).weights == given.weights
    assert not layout.cluster_engine_key.exists()


def test_a_configured_stream_stays_and_must_be_in_reach(tmp_path: Path, layout: RunLayout) -> None:
    weights = {"backend": "stream", "listen": "tcp://0.0.0.0:7764"}
    given = engines(tmp_path, weights=weights)
    assert opened(given, layout, "a", FOUND).weights == given.weights
    given = given.model_copy(
        update={"weights": given.weights.model_copy(update={"listen": "tcp://127.0.0.1:7764"})}
    )
    with pytest.raises(ConfigError, match=r"weights\.listen: the nodes of the cluster do not reach it"):
        opened(given, layout, "b", FOUND)


def test_without_the_cipher_nothing_is_started(
    tmp_path: Path, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        PackageMissingError,
        match=r"cryptography is missing: .*rolloutmq\[cluster\].*cluster\.place_engines = false",
    ):
        opened(engines(tmp_path), layout, "a", FOUND)


def reserving(tmp_path: Path) -> RunConfig:
    return config(tmp_path).model_copy(
        update={"cluster": ClusterConfig(engine="ray", address="a:1", reserve_cpus=2, reserve_gpus=0.5)}
    )


def test_the_cluster_keeps_the_reserved_part_of_this_host(
    tmp_path: Path, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Hold]] = []

    def hold(address: str, wanted: Hold) -> Held:
        asked.append((address, wanted))
        return Held(gpus=("3",))

    monkeypatch.setattr(opening, "hold", hold)
    assert reserved(reserving(tmp_path), layout, "token") == ("3",)
    namespace = namespace_of(layout)
    wanted = Hold(namespace=namespace, token="token", cpus=2, gpus=0.5, lease_s=60, timeout_s=60)
    assert asked == [("a:1", wanted)]
    assert reserved(RunConfig(), layout, "token") == ()
    assert len(asked) == 1


def test_what_this_host_has_not_is_told(
    tmp_path: Path, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "cluster.reserve_cpus: 2 CPU are too much for this host, a node of 1 CPU"
    monkeypatch.setattr(opening, "hold", lambda *_: Held(problem=problem))
    with pytest.raises(ConfigError) as refused:
        reserved(reserving(tmp_path), layout, "token")
    assert str(refused.value) == problem
