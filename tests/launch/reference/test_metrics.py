"""The page of all metrics names every one of them."""

import inspect
import re
import typing
from pathlib import Path

import msgspec

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import InferenceAddress, RunLayout, Target
from rolloutmq.schemas.wire.control import Pressure, StatusReply, StepDone
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.gateway.pages import metrics
from rolloutmq.services.monitor.liveness import RunLiveness
from rolloutmq.services.monitor.report.summary import summarise
from rolloutmq.services.monitor.status.worker_view import WorkerRow
from rolloutmq.services.telemetry.export.prometheus.catalogue import CATALOGUE

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()


def test_every_metric_of_the_gateway_is_on_the_page_with_its_type() -> None:
    found = re.findall(r'_metric\(\s*"(\w+)", "(gauge|counter)"', inspect.getsource(metrics))
    assert len(found) == inspect.getsource(metrics).count("_metric(") - 1  # without its definition
    for name, kind in found:
        full = f"{metrics.PREFIX}{name}_total" if kind == "counter" else f"{metrics.PREFIX}{name}"
        assert f"| `{full}` | {kind} |" in PAGE


def test_every_key_of_the_summary_is_on_the_page(tmp_path: Path) -> None:
    own, outside = (
        summarise(RunLayout(tmp_path), validate({"trainer": {"enabled": enabled}}), saved_ids=lambda _: [])
        for enabled in (True, False)
    )
    keys = own.keys() | outside.keys() | {"bias", "ended", "seed"}
    assert "groups_settled" in keys
    section = PAGE.partition("\n## summary.json")[2]
    assert [key for key in sorted(keys) if f"`{key}`" not in section] == []


def test_no_table_of_the_page_names_a_key_twice() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        names = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
        assert sorted(names) == sorted(set(names))


def test_every_key_of_the_status_is_on_the_page() -> None:
    section = PAGE.partition("\n## Status as JSON")[2].partition("\n## ")[0]
    parts = (StatusReply, Pressure, InferenceAddress, Target, WorkerRow)
    keys = {field.name for part in parts for field in msgspec.structs.fields(part)}
    keys |= {"why", "engines", "gpus", "limits", "supervision", "life", "orchestrator", "targets", "workers"}
    assert [key for key in sorted(keys | set(RunLiveness)) if f"`{key}`" not in section] == []


def test_every_kind_of_event_and_every_field_of_a_step_is_on_the_page() -> None:
    section = PAGE.partition("\n## metrics.jsonl")[2].partition("\n## ")[0]
    for event in typing.get_args(Event):
        assert f"| `{event.__struct_config__.tag}` |" in section
    names = [field.name for field in msgspec.structs.fields(StepDone)]
    assert [name for name in names if f"`{name}`" not in section] == []


def test_every_metric_of_a_run_is_on_the_page_with_its_type_and_labels() -> None:
    section = PAGE.partition("\n## Prometheus metrics of a run")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `rolloutmq_.*$", section, re.MULTILINE))
    assert rows == {
        f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.says} |"
        for spec in CATALOGUE.values()
    }
