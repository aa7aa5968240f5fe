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
    ],
)
def test_a_directory_without_a_whole_model_is_refused(
    damage: Callable[[Path], None], problem: str, model: Path
) -> None:
    damage(model)
    (found,) = problems(str(model))
    assert found.startswith(f"model.path: {problem.format(model=model)}")


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ('{"model_type":', "Expecting value: line 1"),
        ("\xff", "invalid start byte"),
        ("[" * 100_000, "recursion"),
        *((text, "weight_map must name") for text in ("[]", "null", '""', "{}")),
        *(
            (f'{{"weight_map": {value}}}', "weight_map must name")
            for value in ("{}", "[]", "null", '""', "1")
        ),
        *(
            (f'{{"weight_map": {{"a": "a.safetensors", "b": {value}}}}}', "weight_map.b must be the name")
            for value in ("1", "null", '""', "[]", "{}", "true")
        ),
    ],
)
def test_a_damaged_index_of_weights_is_refused(index: str, problem: str, model: Path) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text(index, "latin-1")
    (found,) = problems(str(model))
    assert found.startswith(f"model.path: {model}: model.safetensors.index.json is damaged: ")
    assert problem in found
    assert found.endswith("; save the weights there again")


def test_an_index_may_name_a_file_that_no_system_has(model: Path) -> None:
    _split()(model)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    (found,) = problems(str(model))
    assert found.startswith(f"model.path: {model} has no xxx")


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "{torn"])
def test_a_whole_file_of_weights_passes_beside_an_old_index(index: str, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    assert problems(str(model)) == []


def test_an_index_without_its_files_is_refused_beside_pytorch_s_format(model: Path) -> None:
    """As transformers does: it prefers the index."""
    _split("a.safetensors")(model)
    (model / "pytorch_model.bin").touch()
    (found,) = problems(str(model))
    assert found.startswith(f"model.path: {model} has no b.safetensors")


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
