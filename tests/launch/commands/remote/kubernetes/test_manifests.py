"""The manifests of Kubernetes: they fit each other, the command line, the configuration and the metrics."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tests.launch.commands.remote.kubernetes.manifests import (
    CONFIG,
    DIRECTORY,
    KUSTOMIZATION,
    named,
    pod_specs,
    resources,
)

from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.launch.cli import app
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.telemetry.export.prometheus.catalogue import CATALOGUE

SPECS = pod_specs()
PODS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
WORKER = SPECS["worker"]["containers"][0]
RUN = SPECS["run"]["containers"][0]
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is missing: it builds the kustomization"
)


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the parameters of a command line as the real parser reads them; it fails for an unknown one."""
    command: Any = typer.main.get_command(app)
    sub = command.commands[words[0]]
    return dict(sub.make_context(words[0], words[1:]).params)


def run_words() -> list[str]:
    """Return the command line of the run's script, as for a resumed run."""
    script = RUN["args"][0].replace("\\\n", " ")
    (line,) = re.findall(r"^exec rolloutmq (.+)$", script, re.MULTILINE)
    (options,) = re.findall(r"set -- (\S+);", script)
    return str(line.replace('"$@"', options)).split()


def test_the_command_line_knows_the_worker_and_its_options() -> None:
    found = parsed([*WORKER["command"][1:], *WORKER["args"]])
    assert found["env"] in CONFIG["environment"]
    assert found["connect"] == ["tcp://rolloutmq:7760"]
    assert found["count"] == 1, "the autoscaler's target is a number of workers, and KEDA's of pods"
    grace_s = found["grace"] + validate(CONFIG).orchestrator.term_grace_s
    assert grace_s < SPECS["worker"]["terminationGracePeriodSeconds"]
    assert str(found["probe_dir"]) in str(WORKER["livenessProbe"])


def test_the_command_line_knows_the_run_and_its_options() -> None:
    found = parsed(run_words())
    assert found["resume"]
    assert found["plain"]
    assert str(found["probe_dir"]) in str(RUN["livenessProbe"])
    assert f"{found['run_dir']}/config.json" in RUN["args"][0]
    (mount,) = (one for one in RUN["volumeMounts"] if one["name"] == "config")
    assert (str(found["config"]), "run.toml") == (mount["mountPath"], mount["subPath"])


def test_an_unknown_option_does_not_parse() -> None:
    with pytest.raises(Exception, match="No such option: --nosuch"):
        parsed([*WORKER["command"][1:], *WORKER["args"], "--nosuch"])


def test_ports_are_those_of_the_configuration() -> None:
    config = validate(CONFIG)
    first = int(config.broker.listen.rpartition(":")[2])
    wanted = {*range(first, first + 4), config.inference.port, config.telemetry.metrics_port}
    service = named("Service", "rolloutmq")["spec"]["ports"]
    assert {one["port"] for one in service} == wanted
    assert {one["containerPort"] for one in RUN["ports"]} == wanted
    rules = named("NetworkPolicy", "rolloutmq")["spec"]["ingress"]
    allowed = [
        range(one["port"], one.get("endPort", one["port"]) + 1) for rule in rules for one in rule["ports"]
    ]
    assert {port for ports in allowed for port in ports} == wanted


@PODS
def test_each_path_is_on_a_volume_or_in_the_image(spec: dict[str, Any]) -> None:
    for container in (*spec["initContainers"], *spec["containers"]):
        mounts = [one["mountPath"] for one in container["volumeMounts"]]
        words = " ".join((*container["command"], *container["args"]))
        for path in re.findall(r"(?<![\w:/])/(?!bin/)[\w./-]+", words):
            assert path.startswith((*mounts, "/home/rolloutmq/examples")), (container["name"], path)


@PODS
def test_volumes_and_what_is_mounted_fit_each_other(spec: dict[str, Any]) -> None:
    claims = named("StatefulSet", "rolloutmq")["spec"]["volumeClaimTemplates"]
    known = {one["name"] for one in spec["volumes"]}
    mounted = {
        one["name"] for each in (*spec["initContainers"], *spec["containers"]) for one in each["volumeMounts"]
    }
    assert mounted - known <= {one["metadata"]["name"] for one in claims}
    assert known <= mounted
    generated = {
        one["name"] for key in ("configMapGenerator", "secretGenerator") for one in KUSTOMIZATION[key]
    }
    used = {
        one.get("configMap", {}).get("name") or one.get("secret", {}).get("secretName", "")
        for one in spec["volumes"]
    } - {""}
    assert used
    assert used <= generated


@PODS
def test_a_pod_has_no_rights_that_it_does_not_need(spec: dict[str, Any]) -> None:
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    for container in (*spec["initContainers"], *spec["containers"]):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_selectors_select_the_pods() -> None:
    for kind, name in (("StatefulSet", "rolloutmq"), ("Deployment", "rolloutmq-workers")):
        found = named(kind, name)["spec"]
        labels = found["template"]["metadata"]["labels"]
        assert found["selector"]["matchLabels"] == labels
        assert named("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"] == labels
    selector = named("Service", "rolloutmq")["spec"]["selector"]
    assert selector == named("StatefulSet", "rolloutmq")["spec"]["template"]["metadata"]["labels"]


def test_names_of_pods_stay_apart_in_the_names_of_workers() -> None:
    name = named("Deployment", "rolloutmq-workers")["metadata"]["name"]
    assert len(f"{name}-0123456789-01234") <= 40, "names of hosts are cut at 40 characters"


def test_keda_asks_for_a_metric_that_exists_within_the_bounds_of_the_run() -> None:
    scaled = named("ScaledObject", "rolloutmq-workers")["spec"]
    (trigger,) = scaled["triggers"]
    query = trigger["metadata"]["query"]
    ((name, matchers),) = re.findall(r"(rolloutmq_\w+)\{([^}]*)\}", query)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
    assert labels.keys() <= {*CATALOGUE[name].labels, "job"}
    config = validate(CONFIG)
    section = config.environment[labels["env"]]
    bounds = scaled["minReplicaCount"], scaled["maxReplicaCount"]
    assert bounds == (section.min_workers, section.max_workers)
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert not config.orchestrator.start_workers
    deployment = named("Deployment", "rolloutmq-workers")
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "applying it again would set the number back"


@needs_kubectl
def test_kustomize_builds_it_and_names_what_it_generates(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(DIRECTORY, base)
    keys = KeyDirectory.create(base / "keys")
    save_bundle(base / "worker.key", keys.new("workers", Role.WORKER))
    done = subprocess.run(
        ["kubectl", "kustomize", str(base)],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    generated = {one["metadata"]["name"] for one in built if one["kind"] in {"ConfigMap", "Secret"}}
    assert len(generated) == 3
    assert all(re.search(r"-[0-9a-z]{10}$", name) for name in generated)
    pods = [one["spec"]["template"]["spec"] for one in built if one["kind"] in {"StatefulSet", "Deployment"}]
    volumes = [volume for pod in pods for volume in pod["volumes"]]
    used = {
        one[kind][key]
        for one in volumes
        for kind, key in (("configMap", "name"), ("secret", "secretName"))
        if kind in one
    }
    assert used == generated
    assert len(built) == len(list(resources())) + 3
