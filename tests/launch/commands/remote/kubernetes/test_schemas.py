"""Each manifest fits the schema of its kind; needs the environment of `make test-kubernetes`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.commands.remote.kubernetes.manifests import DIRECTORY, named, resources

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="run it by `make test-kubernetes`"),
]
VERSIONS = ("1.30", "1.33", "1.37")
"""Oldest version that is promised, one between, and the newest one known."""
BUILT_IN = [one for one in resources() if one["kind"] != "ScaledObject"]
KEDA = Path(__file__).with_name("keda_scaledobject.yaml")
"""Schema of KEDA 2.20's custom resource, from its release."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("one", BUILT_IN, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_an_object_fits_the_schema_of_kubernetes(one: dict[str, Any], version: str) -> None:
    import kubernetes_validate

    assert kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_object_does_not_fit() -> None:
    import kubernetes_validate

    wrong = yaml.safe_load((DIRECTORY / "workers.yaml").read_text())
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that refuses unknown fields, as the server drops them without a word."""
    found = {key: closed(one) if isinstance(one, dict) else one for key, one in schema.items()}
    if isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def test_the_scaled_object_fits_the_schema_of_keda() -> None:
    import jsonschema

    (version,) = yaml.safe_load(KEDA.read_text())["spec"]["versions"]
    schema = closed(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    scaled = named("ScaledObject", "rolloutmq-workers")
    jsonschema.validate(scaled["spec"], schema)
    wrong = scaled["spec"] | {"maxReplicas": 4}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)
