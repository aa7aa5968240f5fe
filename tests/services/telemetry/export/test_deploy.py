"""The dashboard and the alerts: each query names metrics and labels that exist, and Prometheus accepts it."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.services.telemetry.export.prometheus.catalogue import CATALOGUE, Kind

DEPLOY = Path(__file__).parents[4] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "rolloutmq.json").read_text())
OF_PROMETHEUS = {"job", "instance", "le"}
SELECTOR = re.compile(r"(rolloutmq_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield from (panel, *panel.get("panels", ()))


def queries() -> list[str]:
    """All queries of the dashboard, those of its variables as the selector in them."""
    found = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    found += [one["definition"].removeprefix("label_values(").rpartition(",")[0] for one in variables]
    return found


def alerts() -> list[str]:
    text = RULES.read_text()
    single = re.findall(r"^ +expr: (?!\|)(.+)$", text, re.MULTILINE)
    several = re.findall(r"^ +expr: \|\n((?: {10,}.+\n)+)", text, re.MULTILINE)
    assert len(single) + len(several) == text.count("- alert:")
    return single + several


def labels_of(name: str) -> frozenset[str]:
    """Return the labels of a series; fail if there is no such metric."""
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    spec = CATALOGUE.get(name) or CATALOGUE.get(base)
    assert spec is not None, f"{name}: there is no such metric"
    assert (base != name) == (spec.kind is Kind.HISTOGRAM), f"{name}: a {spec.kind} is no series of its own"
    return frozenset(spec.labels) | OF_PROMETHEUS


@pytest.mark.parametrize("query", [*queries(), *alerts()])
def test_a_query_names_metrics_and_labels_that_exist(query: str) -> None:
    selectors = SELECTOR.findall(query)
    assert selectors or query.startswith("up{")
    known = {label for name, _ in selectors for label in labels_of(name)}
    for name, matchers in selectors:
        assert set(re.findall(MATCHER, matchers)) <= labels_of(name), query
    for grouping in GROUPING.findall(query):
        assert {label.strip() for label in grouping.split(",")} <= known, query


@pytest.mark.parametrize(
    "panel", [one for one in panels() if one["type"] != "row"], ids=lambda one: str(one["title"])
)
def test_a_legend_names_labels_of_its_query(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        labels = {label for name, _ in SELECTOR.findall(target["expr"]) for label in labels_of(name)}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_only_counters_have_a_rate() -> None:
    for query in [*queries(), *alerts()]:
        for name in re.findall(r"(?:rate|increase)\((rolloutmq_\w+)", query):
            spec = CATALOGUE.get(name) or CATALOGUE[re.sub(r"_(bucket|count|sum)$", "", name)]
            assert spec.kind is not Kind.GAUGE, query


def test_panels_have_places_and_ids_of_their_own() -> None:
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in panels()]
    assert len({panel["id"] for panel in panels()}) == len(places)
    cells = [
        (column, line) for x, y, w, h in places for column in range(x, x + w) for line in range(y, y + h)
    ]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24


def without_variables(query: str) -> str:
    return query.replace("$__rate_interval", "1m").replace("$", "")


@needs_promtool
def test_promtool_accepts_every_query(tmp_path: Path) -> None:
    rules = [
        f"  - record: query_{number}\n    expr: {json.dumps(without_variables(query))}\n"
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "queries.yml"
    file.write_text("groups:\n- name: queries\n  rules:\n" + "".join(rules))
    checked(file, len(rules))


@needs_promtool
def test_promtool_accepts_the_alerts_and_the_configuration() -> None:
    checked(RULES, len(alerts()))
    call("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))


def checked(file: Path, rules: int) -> None:
    assert f"{rules} rules found" in call("check", "rules", "--lint=all", "--lint-fatal", str(file))


def call(*words: str) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CALLS = "rolloutmq_call_duration_seconds_count"
ALERT_TEST = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'rolloutmq_up{{instance="r"}}', values: '1x5 0x30'}}
      - {{series: 'rolloutmq_groups{{instance="r",state="dead"}}', values: '0x10 1x30'}}
      - {{series: 'rolloutmq_trainer_starved_seconds_total{{instance="r"}}', values: '0+45x60'}}
      - {{series: 'rolloutmq_finding{{instance="r",env="math",finding="collapse"}}', values: '1x60'}}
      - {{series: '{calls}{{instance="r",engine="e",status="2xx"}}', values: '0+90x60'}}
      - {{series: '{calls}{{instance="r",engine="e",status="5xx"}}', values: '0+{bad}x60'}}
    alert_rule_test:
{expected}"""


def fires(alert: str, labels: str, severity: str) -> str:
    """Return the beginning of an expectation at 20 minutes; with no labels, of no alert."""
    fired = f"{{exp_labels: {{severity: {severity}, {labels}}}, exp_annotations: {{}}}}" if labels else ""
    return f"      - {{eval_time: 20m, alertname: {alert}, exp_alerts: [{fired}]}}\n"


@needs_promtool
@pytest.mark.parametrize("bad", [1, 20])
def test_alerts_fire_when_they_should(tmp_path: Path, bad: int) -> None:
    bare = re.sub(r"^ +annotations:\n(?: {10}.+\n)+", "", RULES.read_text(), flags=re.MULTILINE)
    assert "annotations" not in bare
    rules, file = tmp_path / "rules.yml", tmp_path / "test.yml"
    rules.write_text(bare)
    expected = fires("RolloutMQBrokerAway", "instance: r", "critical")
    expected += fires("RolloutMQDeadGroups", "instance: r, state: dead", "warning")
    expected += fires("RolloutMQTrainerStarves", "instance: r", "warning")
    expected += fires("RolloutMQFinding", "instance: r, env: math, finding: collapse", "warning")
    expected += fires("RolloutMQCallsFail", "instance: r, engine: e" if bad > 5 else "", "warning")
    expected += fires("RolloutMQGpuLost", "", "critical")
    file.write_text(ALERT_TEST.format(rules=rules, bad=bad, calls=CALLS, expected=expected))
    call("test", "rules", str(file))
