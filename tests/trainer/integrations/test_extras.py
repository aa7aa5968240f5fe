"""An adapter without its package names the package and the extra."""

import importlib
import sys

import pytest

from rolloutmq.schemas.errors import MissingError

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
