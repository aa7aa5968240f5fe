"""Programs in place of classes: placeholders, and which keys go together."""

from typing import Any

import pytest

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.command import (
    PLACEHOLDERS,
    filled,
    placeholders_of,
    problem_of_secrets,
    resolved,
    secrets_in,
)
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

GATEWAY = {"enabled": True, "port": 8123}


def run(environment: dict[str, Any], name: str = "e", **sections: Any) -> RunConfig:
    given = {"group_size": 4, "command": ["prog"], **environment}
    return validate({"environment": {name: given}, "gateway": GATEWAY, **sections})


def test_only_a_lower_case_word_in_braces_is_a_placeholder() -> None:
    text = 'a{worker}b {"json": {}} {Worker} {{worker}} {0}'
    assert placeholders_of([text]) == ["worker"]
    assert filled(text, {"worker": "e-3"}) == 'ae-3b {"json": {}} {Worker} {worker} {0}'


def test_a_program_is_not_paced_and_nothing_of_it_is_too_old() -> None:
    section = run({}).environment["e"]
    assert (section.pacing, section.stale) == (False, "pass")
    again = RunConfig.model_validate_json(run({}).model_dump_json())
    assert again.environment["e"] == section


@pytest.mark.parametrize(
    ("environment", "path", "words"),
    [
        ({"command": []}, "environment.e.entry", ["is required", "command"]),
        ({"command": [], "entry": "m:C", "variables": {"A": "b"}}, "environment.e.variables", ["options"]),
        ({"entry": "m:C"}, "environment.e.entry", ["beside `command`", "m:C"]),
        ({"options": {"a": "k"}}, "environment.e.options", ["has no effect on a program; remove it"]),
        ({"tasks": "both"}, "environment.e.tasks", ["no effect"]),
        ({"split": "eval"}, "environment.e.split", ["no effect"]),
        ({"min_group_size": 2}, "environment.e.min_group_size", ["no effect"]),
        ({"pacing": True}, "environment.e.pacing", ["must be false"]),
        ({"stale": "drop"}, "environment.e.stale", ['must be "pass"']),
        (
            {"command": ["p", "{gateway}"]},
            "environment.e.command",
            ["`{gateway}`", "did you mean `{gateway_url}`"],
        ),
        ({"variables": {"A": "{x}"}}, "environment.e.variables", ["`{x}`", "{worker}"]),
        ({"variables": {"A=B": "1"}}, "environment.e.variables", ["without `=`"]),
        ({"command": ["p", "a\0b"]}, "environment.e.command", ["null character"]),
        ({"command": "python x.py"}, "environment.e.command", ["must be a list, such as"]),
        ({"drain_quiet_s": 0}, "environment.e.drain_quiet_s", ["greater than 0"]),
        ({"enough_batches": 0}, "environment.e.enough_batches", ["greater than 0"]),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    environment: dict[str, Any], path: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(environment)
    assert caught.value.path == path
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("sections", "path", "word"),
    [
        ({"gateway": {}}, "gateway.enabled", "environment.e.command"),
        ({"gateway": {"enabled": True, "listen": False}}, "gateway.listen", "environment.e.command"),
        ({"orchestrator": {"enabled": False}}, "orchestrator.enabled", "environment.e.command"),
    ],
)
def test_a_program_needs_the_gateway_and_the_orchestrator(
    sections: dict[str, Any], path: str, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run({}, **sections)
    assert caught.value.path == path
    assert word in str(caught.value)


def test_the_inference_server_of_a_placeholder_must_have_an_address() -> None:
    asks = {"command": ["p", "{inference_url}"]}
    with pytest.raises(ConfigError, match=r"inference\.port: required"):
        run(asks)
    with pytest.raises(ConfigError, match=r"inference\.kind: must name a server"):
        run(asks, inference={"kind": "none"}, trainer={"enabled": False})
    run(asks, inference={"port": 8001})
    run(asks, inference={"kind": "external", "url": "http://x/v1"})


def test_a_long_name_is_refused_because_the_names_of_workers_are_longer() -> None:
    run({}, "e" * 48)
    with pytest.raises(ConfigError, match="at most 48 characters"):
        run({}, "e" * 49)


def test_every_placeholder_has_a_meaning() -> None:
    assert all(text.endswith((".", "`.")) for text in PLACEHOLDERS.values())


OPTIONS = {
    "key": "env:API_KEY",
    "text": "environment:API_KEY",
    "part": "see env:API_KEY",
    "number": 3,
    "deep": {"list": ["env:OTHER", 1.5, None, True]},
}


def test_references_are_whole_texts_at_any_depth() -> None:
    assert list(secrets_in(OPTIONS)) == ["API_KEY", "OTHER"]
    assert not list(secrets_in({"a": "env:", "b": "env:1A", "c": "env:A B", "env:KEY": 1}))


def test_the_values_take_the_place_of_their_references() -> None:
    environ = {"API_KEY": "k", "OTHER": "o"}
    assert resolved(OPTIONS, environ) == {
        **OPTIONS,
        "key": "k",
        "deep": {"list": ["o", 1.5, None, True]},
    }
    assert OPTIONS["key"] == "env:API_KEY"


def test_a_variable_that_is_not_set_is_named_without_any_value() -> None:
    assert not problem_of_secrets(OPTIONS, {"API_KEY": "k", "OTHER": ""})
    problem = problem_of_secrets(OPTIONS, {"API_KEY": "k"})
    assert (
        problem == "`env:OTHER` names an environment variable that is not set; export OTHER before the start"
    )
    with pytest.raises(KeyError):
        resolved(OPTIONS, {})
