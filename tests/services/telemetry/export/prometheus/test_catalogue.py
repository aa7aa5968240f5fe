"""Names and labels follow the conventions of Prometheus, and the metrics of the gateway have the same ones."""

import inspect
import re

import pytest
from tests.services.telemetry.export.events import every_kind
from tests.services.telemetry.export.prometheus.pages import metrics_of, text_of

from rolloutmq.services.gateway.pages import metrics as gateway
from rolloutmq.services.telemetry.export.prometheus.catalogue import CATALOGUE, Kind, Spec

UNITS = ("seconds", "bytes", "ratio", "celsius", "cores", "tokens", "steps")


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=lambda spec: str(spec.name))
def test_a_name_follows_the_conventions(spec: Spec) -> None:
    assert re.fullmatch(r"rolloutmq_[a-z][a-z0-9_]*", spec.name)
    assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER)
    assert not re.search(r"_(s|ms|percent|mb|milliseconds)(_total)?$", spec.name)
    assert spec.says[0].isupper() or spec.says[0].isdigit()
    assert spec.says.endswith(".")
    if spec.kind is Kind.HISTOGRAM:
        assert spec.name.endswith("_seconds")
        assert "le" not in spec.labels


def test_no_two_families_have_one_name_in_openmetrics() -> None:
    names = [spec.name.removesuffix("_total") for spec in CATALOGUE.values()]
    assert len(names) == len(set(names))


def test_each_metric_is_on_a_page_with_its_help_and_type() -> None:
    page = text_of(metrics_of(every_kind()))
    missing = [
        spec.name
        for spec in CATALOGUE.values()
        if f"# HELP {spec.name} {spec.says}\n# TYPE {spec.name} {spec.kind}\n{spec.name}" not in page
    ]
    assert missing == []


def test_a_metric_of_the_gateway_has_the_same_type_here() -> None:
    theirs = re.findall(r'_metric\(\s*"(\w+)", "(gauge|counter)"', inspect.getsource(gateway))
    full = {f"rolloutmq_{name}{'_total' * (kind == 'counter')}": kind for name, kind in theirs}
    own = {"rolloutmq_step_total", "rolloutmq_gateway_groups_total"}  # of the gateway alone
    assert full.keys() - own <= CATALOGUE.keys()
    assert all(CATALOGUE[name].kind == kind for name, kind in full.items() if name not in own)
