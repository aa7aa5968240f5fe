"""An adapter without its package names the package and the extra."""

import importlib
import sys
from pathlib import Path

import pytest

from rolloutmq.schemas.errors import MissingError
from rolloutmq.trainer.integrations.extras import from_extra

ADAPTERS = {
    "skyrl": ("entrypoint", "generator", "training", "inference"),
    "verl": ("manager", "sampling", "settings", "store"),
}
PACKAGES = ("skyrl", "ray", "verl", "transfer_queue", "omegaconf", "tensordict")


@pytest.mark.parametrize(
    ("extra", "module"), [(extra, module) for extra, modules in ADAPTERS.items() for module in modules]
)
def test_a_missing_package_is_named_with_its_extra(
    extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    for one in ADAPTERS[extra]:
        monkeypatch.delitem(sys.modules, f"rolloutmq.trainer.integrations.{extra}.{one}", raising=False)
    with pytest.raises(
        MissingError, match=rf"^the package \w+ is missing: run pip install 'rolloutmq\[{extra}\]'$"
    ):
        importlib.import_module(f"rolloutmq.trainer.integrations.{extra}.{module}")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import another_version.train", "No module named 'another_version.train'"),
        ("from another_version import train", "cannot import name 'train' from 'another_version'"),
    ],
)
@pytest.mark.parametrize(
    ("distribution", "told"), [(True, "another_version 0.1"), (False, "another_version")]
)
def test_an_installed_package_of_another_version_is_not_called_missing(
    program: str, problem: str, distribution: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another_version").mkdir()
    (tmp_path / "another_version" / "__init__.py").touch()
    if distribution:
        about = tmp_path / "another_version-0.1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: another_version\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "another_version", raising=False)
    with pytest.raises(MissingError) as caught, from_extra("skyrl"):
        exec(program)
    assert str(caught.value).startswith(f"the installed {told} cannot be used ({problem}")
    assert str(caught.value).endswith("): run pip install 'rolloutmq[skyrl]'")
    assert isinstance(caught.value.__cause__, ImportError)
    del sys.modules["another_version"]
