"""Fields of requests: which of them a package or its section may set, also while a rollout runs."""

from typing import Any

import pytest

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.verifiers.request_fields import (
    ALLOWED,
    NEEDED,
    NEUTRAL,
    OWN,
    check_request,
    refusal,
)


def test_a_field_has_one_rule() -> None:
    rules: list[set[str]] = [{*ALLOWED}, {*NEEDED}, {*NEUTRAL}, {*OWN}]
    assert len(set().union(*rules)) == sum(map(len, rules))


def test_neutral_values_and_none_are_allowed() -> None:
    for name, values in NEUTRAL.items():
        assert [refusal(name, value, extra=True) for value in (*values, None)] == [""] * (len(values) + 1)
    assert refusal("seed", None, extra=True) == refusal("logprobs", True, extra=True) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.5},
        {"top_p": 1.0, "extra_body": {"top_p": 0.5}},
        {"extra_body": {"temperature": 0.5}},
        {"seed": 1},
    ],
)
def test_a_request_that_a_rollout_has_changed_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^sampling_args: "):
        check_request({"temperature": 1.0, **fields})


def test_a_rollout_may_change_the_rest() -> None:
    check_request(
        {"temperature": 0.5, "max_tokens": 3, "top_p": 0.5, "extra_body": {"top_p": 1.0, "stop": ["x"]}}
    )
    check_request({"n": 1, "extra_body": None})
