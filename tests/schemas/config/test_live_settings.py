"""Live settings are fields of the configuration models, with their types and bounds."""

import pytest
from tests.services.broker.bench import config

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.live_settings import (
    BROKER_SETTINGS,
    ENVIRONMENT_SETTINGS,
    ORCHESTRATOR_SETTINGS,
    LiveSettingError,
    changed,
    full,
    require_workers,
    split,
    value,
)
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.wire.control import Setting


def test_every_knob_is_a_field_of_the_configuration() -> None:
    assert set(BROKER_SETTINGS) <= BrokerConfig.model_fields.keys()
    assert set(ENVIRONMENT_SETTINGS) <= EnvironmentConfig.model_fields.keys()
    assert set(ORCHESTRATOR_SETTINGS) <= OrchestratorConfig.model_fields.keys()


def test_keys_are_those_of_the_configuration_and_env_may_stand_for_environment() -> None:
    assert (
        split("env.a.b.weight")
        == split("environment.a.b.weight")
        == (
            "environment",
            "a.b",
            "weight",
        )
    )
    assert full("env.a.weight") == "environment.a.weight"
    assert full("broker.lease_s") == "broker.lease_s"
    assert full("orchestrator.max_processes") == "orchestrator.max_processes"
    ours = ("env.a.max_workers", "env.a.min_workers", "orchestrator.max_processes")
    assert [split(key).of_orchestrator for key in (*ours, "env.a.weight", "broker.lease_s")] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("key", "new", "reason"),
    [
        ("broker.listen", "tcp://h:1", "cannot change during a run"),
        ("broker", 1, "cannot change"),
        ("env.e.entry", "x:Y", "cannot change during a run"),
        ("env.weight", 1, "must be broker.FIELD, orchestrator.FIELD or env.NAME.FIELD"),
        ("trainer.steps", 1, "must be broker.FIELD, orchestrator.FIELD or env.NAME.FIELD"),
        ("env.other.weight", 1, "this run has no environment other"),
        ("env.e.weight", -1, "must be greater than or equal to 0 (got -1)"),
        ("env.e.weight", "heavy", "must be a valid number (got 'heavy')"),
        ("env.e.weight", float("inf"), "must be a finite number"),
        ("env.e.min_share", 1.5, "must be less than or equal to 1"),
        ("env.e.stale", "keep", "must be 'drop' or 'pass'"),
        ("env.e.pacing", "perhaps", "must be a valid boolean"),
        ("env.e.max_staleness", 1.5, "must be a valid integer"),
        ("env.e.high_bytes", 20, "too small for its 8 sequences of a batch"),
        ("broker.high_bytes", 20, "too small for a batch of 8 sequences"),
        ("broker.high_groups", 1, "too small for a batch of 8 sequences in groups"),
        ("broker.lease_s", 0, "must be greater than 0"),
        ("orchestrator.tick_s", 1, "cannot change during a run; use one of max_processes"),
        ("env.e.max_workers", 0, "must be greater than 0"),
        ("env.e.min_workers", 5, "min_workers must not exceed max_workers 4 (got 5)"),
    ],
)
def test_a_refusal_names_the_key_and_the_reason(key: str, new: Setting, reason: str) -> None:
    with pytest.raises(LiveSettingError) as refusal:
        changed(config(e={}), {key: new}, ())
    assert refusal.value.key == key
    assert reason in refusal.value.reason


@pytest.mark.parametrize(
    ("key", "enabled", "reason"),
    [
        ("env.e.max_workers", False, "this run starts no workers: orchestrator.enabled is false"),
        ("orchestrator.max_processes", False, "this run starts no workers: orchestrator.enabled is false"),
        ("env.brought.max_workers", True, "this run starts no workers of brought"),
    ],
)
def test_bounds_are_for_workers_that_the_run_starts(key: str, enabled: bool, reason: str) -> None:
    update = {"orchestrator": OrchestratorConfig(enabled=enabled)}
    settings = config(e={}).model_copy(update=update)
    with pytest.raises(LiveSettingError) as refusal:
        require_workers(settings, key)
    assert refusal.value.reason == reason
    require_workers(settings, "env.brought.weight")


def test_what_only_together_contradicts_names_all_of_it() -> None:
    both = {"env.e.min_share": 0.6, "env.f.min_share": 0.6}
    with pytest.raises(LiveSettingError, match=r"env\.e\.min_share, env\.f\.min_share: .*\(got 1\.2\)"):
        changed(config(e={}, f={}), both, ())


def test_values_become_what_the_field_is() -> None:
    later = changed(config(e={}), {"env.e.weight": "2", "env.e.pacing": "true"}, ())
    assert value(later, "env.e.weight") == 2.0
    assert value(later, "env.e.pacing") is True


def test_a_rule_between_sections_names_its_key_once() -> None:
    with pytest.raises(LiveSettingError) as refusal:
        changed(config(e={"min_workers": 2}), {"orchestrator.max_processes": 1}, ())
    problem = "must be at least 2, the sum of environment.*.min_workers (got 1)"
    assert str(refusal.value) == f"orchestrator.max_processes: {problem}"


def test_an_environment_that_nobody_configured_has_the_defaults() -> None:
    later = changed(config(e={}), {"env.brought.max_staleness": 1}, {"brought"})
    assert (value(later, "env.brought.max_staleness"), value(later, "env.brought.weight")) == (1, 1.0)
    assert value(config(e={}), "env.brought.max_staleness") == 4
