"""Other hosts as lines: who joined with which key, what a relay lacks, and what was refused."""

from collections.abc import Callable

import pytest

from rolloutmq.schemas.wire.control import WorkerStatus
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.joining import JoinedEngine, JoinedRelay, KeyUse, NetworkStatus
from rolloutmq.services.monitor.text.network import SHOWN, engine_trouble, lines, unreachable

V = PolicyVersion
ADDRESS = "tcp://0.0.0.0:7760"


def test_without_a_listener_there_is_nothing_to_tell() -> None:
    assert lines(None) == []


def test_an_insecure_listener_is_told() -> None:
    (only,) = lines(NetworkStatus(listen=ADDRESS, insecure=True))
    assert only == ("listen", f"{ADDRESS} insecure: asks for no key", True)


def test_keys_with_refusals_come_first() -> None:
    keys = (
        KeyUse(name="w", role="worker", hosts=("10.0.0.7",), silent_s=1.0),
        KeyUse(name="m", role="monitor", silent_s=80.0, refused={"reset the run": 2, "drain workers": 9}),
        KeyUse(name="old", role=""),
    )
    told = lines(NetworkStatus(listen=ADDRESS, known_keys=7, keys=keys))
    assert [line.text for line in told] == [
        f"{ADDRESS}, keys in use: 3 of 7",
        "m, role monitor, heard 80 s ago; refused: drain workers 9, reset the run 2",
        "w, role worker from 10.0.0.7, heard now",
        "old, revoked, heard now",
    ]
    assert [line.is_unwell for line in told] == [False, True, False, False]


def test_many_keys_are_cut_and_counted() -> None:
    keys = tuple(KeyUse(name=f"k{number}", role="worker") for number in range(SHOWN + 3))
    assert [one.text for one in lines(NetworkStatus(listen=ADDRESS, keys=keys))][-1] == "and 3 more keys"


def test_workers_that_a_cluster_has_placed_have_not_joined(make_worker: Callable[..., WorkerStatus]) -> None:
    workers = [make_worker(name, joined=True, host="gpu7") for name in ("math-0", "math-far.0")]
    told = lines(NetworkStatus(listen=ADDRESS), workers, {"math-0"})
    assert [line.text for line in told][1:] == ["1 worker on gpu7, without a key: math-far.0"]


def test_workers_and_engines_have_their_host_and_key(make_worker: Callable[..., WorkerStatus]) -> None:
    workers = [make_worker(f"math-far.{number}", joined=True, host="gpu7") for number in range(4)]
    workers += [make_worker("math-0"), make_worker("math-far.9", joined=True, state="gone", host="gpu7")]
    workers.append(make_worker("math-x.0", joined=True, host="gpu8", silent_s=99.0))
    network = NetworkStatus(
        listen=ADDRESS,
        workers={f"math-far.{number}": "worker-7" for number in range(4)},
        engines=(JoinedEngine(name="inference.gpu7", host="gpu7", key="engine-7", silent_s=12.0),),
    )
    told = lines(network, workers)[1:]
    assert [line.text for line in told] == [
        "4 workers on gpu7, key worker-7: math-far.0, math-far.1, math-far.2, ...",
        "1 worker on gpu8, without a key: math-x.0; 1 silent",
        "inference.gpu7 on gpu7, key engine-7, heard 12 s ago",
    ]
    assert [line.is_unwell for line in told] == [False, True, True]


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (None, "no version yet"),
        (V(1, 5), "version 1.5, the newest"),
        (V(1, 4), "version 1.4, 1 step behind"),
        (V(1, 2), "version 1.2, 3 steps behind"),
        (V(0, 9), "version 0.9, of an earlier trainer"),
        (V(2, 0), "version 2.0, the newest"),
    ],
)
def test_a_relay_tells_how_far_it_is_behind(version: PolicyVersion | None, told: str) -> None:
    relay = JoinedRelay(name="relay.b", host="b", key="e", version=version)
    *_, line = lines(NetworkStatus(listen=ADDRESS, version=V(1, 5), relays=(relay,)))
    assert line == ("relay", f"relay.b on b, key e: {told}", False)


def test_what_a_relay_waits_for_is_told() -> None:
    relay = JoinedRelay(
        name="relay.b", host="b", serves="tcp://b:1", waits_for="no relay is heard", silent_s=9.0
    )
    *_, line = lines(NetworkStatus(listen=ADDRESS, relays=(relay,)))
    assert line.is_unwell
    assert line.text == (
        "relay.b on b, without a key: no version yet, serves tcp://b:1; waits: no relay is heard; silent for 9 s"
    )


@pytest.mark.parametrize(
    ("version", "unchanged_s", "told", "is_unwell"),
    [
        (V(1, 5), 90.0, ", version 1.5, the newest", False),
        (V(1, 4), 1.0, ", version 1.4, 1 step behind", False),
        (V(1, 2), 60.0, ", version 1.2, 3 steps behind, unchanged for 60 s; its relay may be stuck", True),
        (None, 60.0, "", False),
    ],
)
def test_an_engine_with_stuck_weights_is_unwell(
    version: PolicyVersion | None, unchanged_s: float, told: str, is_unwell: bool
) -> None:
    engine = JoinedEngine(name="inference.gpu7", host="gpu7", version=version, unchanged_s=unchanged_s)
    line = lines(NetworkStatus(listen=ADDRESS, version=V(1, 5), engines=(engine,)))[1]
    assert line.text == f"inference.gpu7 on gpu7, without a key, heard now{told}"
    assert line.is_unwell is is_unwell


def test_engines_that_lag_or_are_silent_are_named_with_the_relay_of_their_host() -> None:
    lags = JoinedEngine(name="inference.gpu7", host="gpu7", version=V(1, 2), unchanged_s=60.0)
    silent = JoinedEngine(name="inference.gpu8", host="gpu8", version=V(1, 5), silent_s=9.0)
    well = JoinedEngine(name="inference.gpu9", host="gpu9", version=V(1, 5), unchanged_s=60.0)
    relay = JoinedRelay(name="relay.gpu7", host="gpu7", version=V(1, 2), silent_s=31.0)

    def told(*engines: JoinedEngine, relays: tuple[JoinedRelay, ...] = ()) -> str:
        return engine_trouble(NetworkStatus(listen=ADDRESS, version=V(1, 5), engines=engines, relays=relays))

    lag = "engine inference.gpu7 has version 1.2, 3 steps behind, for 60 s"
    assert told(well) == engine_trouble(None) == ""
    assert told(silent, well) == "engine inference.gpu8 has not been heard for 9 s"
    assert told(lags) == f"{lag}: its relay may be stuck"
    assert told(lags, relays=(relay,)) == f"{lag}: relay.gpu7 has not been heard for 31 s"
    waits = JoinedRelay(name="relay.gpu7", host="gpu7", version=V(1, 2), waits_for="no relay is heard")
    assert told(lags, silent, relays=(waits,)) == (
        f"{lag}: relay.gpu7 waits, no relay is heard; 1 other engine too"
    )


def test_an_engine_that_workers_do_not_reach_is_named_with_a_reason(
    make_worker: Callable[..., WorkerStatus],
) -> None:
    """`status` listed it as good, newest and idle, while each rollout lost seconds at it."""
    away = {"inference.gpu7": "ConnectionTimeoutError Connection timeout to host http://10.0.0.7:7800"}
    workers = [make_worker(f"w-{number}", engines_away=away) for number in range(3)]
    workers += [make_worker("w-8", engines_away=away, silent_s=99.0), make_worker("w-9")]
    why = f"unreachable from 3 workers: worker w-0: {away['inference.gpu7']}"
    assert unreachable(workers) == {"inference.gpu7": why}
    assert engine_trouble(None, workers) == f"engine_away, engine inference.gpu7 is {why}"
    engine = JoinedEngine(name="inference.gpu7", host="gpu7", version=V(1, 5))
    line = lines(NetworkStatus(listen=ADDRESS, version=V(1, 5), engines=(engine,)), workers)[1]
    assert line.text == f"inference.gpu7 on gpu7, without a key, heard now, version 1.5, the newest; {why}"
    assert line.is_unwell


def test_a_list_of_keys_that_cannot_be_read_is_told() -> None:
    (line,) = lines(NetworkStatus(listen=ADDRESS, known_keys=3, keys_problem="keys: belongs to user 7"))
    assert line.is_unwell
    assert line.text.endswith(
        "keys in use: 0 of 3; the list of keys is not read, and that of before counts: keys: belongs to user 7"
    )


def test_an_engine_that_a_cluster_has_placed_has_not_joined() -> None:
    engines = tuple(JoinedEngine(name=f"inference.{name}", host="gpu7") for name in ("cluster-1", "far"))
    told = lines(NetworkStatus(listen=ADDRESS, engines=engines), (), {"inference.cluster-1"})
    assert [(line.label, line.text) for line in told][1:] == [
        ("placed", "inference.cluster-1 on gpu7, without a key, heard now"),
        ("joined", "inference.far on gpu7, without a key, heard now"),
    ]
