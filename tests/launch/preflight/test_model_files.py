"""A directory that is no model is refused by its key, before a trainer would end over it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.support.saved import save_model

from rolloutmq.launch.preflight.checks import examine
from rolloutmq.launch.settings import validate


def problems(path: str, *, trained: bool = True, **sections: Any) -> list[str]:
    config = validate(
        {
            "model": {"path": path, **sections.pop("model", {})},
            "trainer": {"learning_rate": 1e-3} if trained else {"enabled": False},
            "gateway": {"enabled": True},
            **sections,
        }
    )
    return [str(one) for one in examine(config).problems]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 1)


@pytest.mark.parametrize(
    "path", ["/no/such/place", "./model", "tiny", "org/tiny@main", "https://hub/org/tiny"]
)
def test_a_path_that_is_no_directory_is_refused(path: str) -> None:
    assert problems(path) == [
        "model.path: must be a directory with a config.json, or a model of a hub as organization/name "
        f"(got {path}); correct it; model.revision names a branch, a tag or a commit of a hub"
    ]


def test_a_model_in_a_directory_passes(model: Path) -> None:
    assert problems(str(model)) == []


def _without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def _broken(name: str) -> Callable[[Path], None]:
    def broken(model: Path) -> None:
        (model / name).write_text('{"model_type":')

    return broken


def _directory(name: str) -> Callable[[Path], None]:
    def directory(model: Path) -> None:
        (model / name).unlink()
        (model / name).mkdir()

    return directory


def _split(*present: str) -> Callable[[Path], None]:
    """Split the weights into two files, of which some are there."""

    def split(model: Path) -> None:
        (model / "model.safetensors").unlink()
        weights = {"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        for name in present:
            (model / name).touch()

    return split


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_without("config.json"), "must be a directory with a config.json, or a model of a hub"),
        (_broken("config.json"), "{model}/config.json: is not a model configuration: JSONDecodeError("),
        (
            _without("tokenizer.json"),
            "{model}/tokenizer.json: there is no such file; save a fast tokenizer there",
        ),
        (_broken("tokenizer.json"), "{model}/tokenizer.json: is not a tokenizer: JSONDecodeError("),
        (_directory("tokenizer.json"), "{model}/tokenizer.json: cannot be read: "),
        (
            _without("model.safetensors"),
            "{model} has no model.safetensors; save the weights there, or name another",
        ),
        (_split("a.safetensors"), "{model} has no b.safetensors; save the weights there"),
        (
            _broken("model.safetensors.index.json"),
            "{model}: model.safetensors.index.json is damaged: JSONDecodeError(",
        ),
    ],
)
def test_a_directory_without_a_whole_model_is_refused(
    damage: Callable[[Path], None], problem: str, model: Path
) -> None:
    damage(model)
    (found,) = problems(str(model))
    assert found.startswith(f"model.path: {problem.format(model=model)}")


def test_a_file_is_no_model(model: Path) -> None:
    file = str(model / "config.json")
    (found,) = problems(file)
    assert (
        f"must be a directory with a config.json, or a model of a hub as organization/name (got {file})"
        in found
    )


@pytest.mark.parametrize("arrange", [_split("a.safetensors", "b.safetensors"), _without("model.safetensors")])
def test_weights_may_be_in_several_files_or_in_pytorch_s_format(
    arrange: Callable[[Path], None], model: Path
) -> None:
    arrange(model)
    if not (model / "model.safetensors.index.json").exists():
        (model / "pytorch_model.bin").touch()
    assert problems(str(model)) == []


def test_only_a_trainer_of_the_run_needs_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert problems(str(model), trained=False) == []


def test_a_tokenizer_elsewhere_is_refused_by_its_own_key(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert problems(str(model), model={"tokenizer": str(tmp_path)}) == []
    (found,) = problems(str(model), model={"tokenizer": f"{tmp_path}/none"})
    assert (
        found
        == f"model.tokenizer: must be a directory with a tokenizer.json (got {tmp_path}/none); correct it"
    )


def test_another_server_may_read_other_files_of_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    external = {"kind": "external", "url": "http://127.0.0.1:9/v1"}
    assert problems(str(model), inference=external) == []
