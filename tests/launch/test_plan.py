"""What a configuration turns into."""

from pathlib import Path

from rolloutmq.launch.plan import STOP_ORDER, plan
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role

ENVIRONMENT = {"sort3": {"entry": "env.py:Env"}}


def roles(**sections: object) -> list[Role]:
    config = validate({"environment": ENVIRONMENT, **sections})
    return [spec.role for spec in plan(config, RunLayout(Path("/run")), "python")]


def test_a_whole_run_starts_with_the_broker() -> None:
    assert roles() == [
        Role.BROKER,
        Role.TELEMETRY,
        Role.TRAINER,
        Role.INFERENCE,
        Role.ORCHESTRATOR,
    ]


def test_parts_that_run_elsewhere_are_left_out() -> None:
    assert Role.TRAINER not in roles(trainer={"enabled": False})
    assert Role.ORCHESTRATOR not in roles(orchestrator={"enabled": False})
    assert Role.ORCHESTRATOR not in roles(environment={})
    assert Role.INFERENCE not in roles(inference={"kind": "external", "url": "http://x/v1"})
    assert Role.ORCHESTRATOR in roles(environment={}, inference={"max_engines": 2})  # it keeps the second


def test_a_teacher_of_its_own_is_started_and_that_of_another_run_is_not() -> None:
    learning = {"distillation": {"kind": "top_k"}}
    assert Role.TEACHER not in roles()
    assert Role.TEACHER in roles(teacher={"path": "runs/x"}, trainer=learning)
    assert Role.TEACHER not in roles(teacher={"url": "http://x"}, trainer=learning)


def test_a_curriculum_is_one_process_for_all_environments() -> None:
    several = {name: {"entry": "env.py:Env", "task_count": 5} for name in ("a", "b")}
    assert roles(environment=several, curriculum={"a": {}, "b": {}}).count(Role.CURRICULUM) == 1
    assert Role.CURRICULUM not in roles()


def test_every_role_ends_once_and_the_broker_after_the_workers() -> None:
    ends = [role for together in STOP_ORDER for role in together]
    others = {Role.WORKER, Role.LAUNCHER, Role.DASHBOARD}  # a page is ended beside the plan
    assert sorted(ends) == sorted(set(Role) - others)
    orders = {role: place for place, together in enumerate(STOP_ORDER) for role in together}
    assert orders[Role.ORCHESTRATOR] < orders[Role.BROKER]
    assert orders[Role.CURRICULUM] < orders[Role.BROKER]
    assert orders[Role.ORCHESTRATOR] < orders[Role.GATEWAY], "drained programs deliver through the gateway"


def test_each_process_logs_to_its_own_file() -> None:
    config = validate({"environment": ENVIRONMENT})
    specs = plan(config, RunLayout(Path("/run")), "python")
    assert specs[0].argv[-3:] == ("broker", "--run-dir", "/run")
    assert len({spec.log for spec in specs}) == len(specs)


def test_a_killed_gateway_never_ends_the_run() -> None:
    config = validate({"gateway": {"enabled": True}})
    spare = [spec.role for spec in plan(config, RunLayout(Path("/run")), "python") if spec.spare]
    assert spare == [Role.GATEWAY]


def test_only_telemetry_is_an_observer_that_never_ends_the_run() -> None:
    config = validate({"environment": ENVIRONMENT, "gateway": {"enabled": True}})
    observers = [spec.role for spec in plan(config, RunLayout(Path("/run")), "python") if spec.observer]
    assert observers == [Role.TELEMETRY]


def test_further_ranks_of_the_trainer_are_processes_of_their_own() -> None:
    config = validate({"environment": ENVIRONMENT, "trainer": {"ranks": 3}})
    specs = plan(config, RunLayout(Path("/run")), "python")
    found = {spec.name: spec.argv[-2:] for spec in specs if spec.role is Role.TRAINER}
    assert found == {
        "trainer": ("--run-dir", "/run"),
        "trainer.rank1": ("--rank", "1"),
        "trainer.rank2": ("--rank", "2"),
    }
    assert {spec.crew for spec in specs if spec.role is Role.TRAINER} == {"trainer"}
    assert {spec.crew for spec in specs if spec.role is not Role.TRAINER} == {""}
    assert len({spec.log for spec in specs}) == len(specs)
    assert len(roles(trainer={"ranks": 3, "enabled": False})) == len(roles()) - 1


def test_a_stream_of_weights_has_a_relay() -> None:
    assert roles(weights={"backend": "stream"}).count(Role.RELAY) == 1
    assert Role.RELAY not in roles()


def test_a_cluster_has_a_service_if_it_places_something() -> None:
    engines = {"inference": {"max_engines": 2}, "environment": {}}
    assert Role.CLUSTER in roles(cluster={"engine": "ray"})
    assert Role.CLUSTER in roles(cluster={"engine": "ray"}, **engines)
    assert Role.CLUSTER not in roles(cluster={"engine": "ray", "place_engines": False}, **engines)
    assert Role.CLUSTER not in roles(**engines)
    assert Role.CLUSTER in roles(cluster={"engine": "ray", "reserve_gpus": 1}, environment={})
