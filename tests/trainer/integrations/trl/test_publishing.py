"""The weights of a trainer reach a reader: under its version, and refused by name where that cannot be."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.integrations.trl.support import config

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, WeightsMismatchError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.integrations.trl.publishing import (
    BusWeightTransfer,
    published,
    require_publishable,
    state_tensors,
)
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.policy.tokenizer import write_tokenizer
from rolloutmq.trainer.weights.backends import attach
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint

V = PolicyVersion


class Words:
    """A tokenizer that can be saved."""

    def __init__(self, run: RunConfig) -> None:
        self.run = run

    def save_pretrained(self, directory: str) -> None:
        write_tokenizer(self.run.model, Path(directory))


def read(run: RunConfig, layout: RunLayout) -> tuple[PolicyVersion, dict[str, torch.Tensor]]:
    """What a reader gets that knows nothing but the run directory."""
    model: Any = build_policy(run.model, 9)
    tokenizer = directory_fingerprint(layout.model)
    with closing(attach(model, layout.weights, tokenizer=tokenizer)) as share, share.reading() as version:
        return version, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.mark.parametrize("backend", ["posix_shm", "disk"])
def test_the_weights_of_a_trainer_are_published_with_each_batch(run_dir: Path, backend: str) -> None:
    run, layout = config(weights={"backend": backend}, inference={}), RunLayout(run_dir)
    model: Any = build_policy(run.model, 1)
    parameters = [id(parameter) for parameter in model.parameters()]
    with published(model, Words(run), state_tensors, run, layout, V(2, 5), leads=True) as publication:
        assert (layout.model / "config.json").is_file()
        version, found = read(run, layout)
        assert version == V(2, 5)
        assert same(found, model.state_dict())
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        assert not same(read(run, layout)[1], model.state_dict())
        publication.publish(V(2, 6))
        version, found = read(run, layout)
        assert version == V(2, 6)
        assert same(found, model.state_dict())
    assert [id(parameter) for parameter in model.parameters()] == parameters  # those of its optimizer
    assert not layout.weights.exists()


def test_a_rank_that_does_not_lead_takes_part_and_publishes_nothing(run_dir: Path) -> None:
    run, layout, asked = config(), RunLayout(run_dir), 0
    model = build_policy(run.model, 1)

    def tensors(_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal asked
        asked += 1
        yield from ()

    with published(model, Words(run), tensors, run, layout, V(0, 0), leads=False) as publication:
        publication.publish(V(0, 1))
    assert asked == 2
    assert not layout.weights.exists()


def test_adapters_are_refused_unless_their_tensors_are_given() -> None:
    run = config()
    model: Any = build_policy(run.model, 1)
    model.peft_config = {}
    with pytest.raises(ConfigError, match=r"peft_config: the weights of adapters are not merged"):
        require_publishable(model, state_tensors, run)
    require_publishable(model, lambda _model: (), run)


@pytest.mark.parametrize("by_path", [False, True])
def test_the_weight_syncs_of_the_asynchronous_trainer_are_published(run_dir: Path, by_path: bool) -> None:
    run, layout, version = config(weights={"backend": "disk"}, inference={}), RunLayout(run_dir), V(1, 3)
    write_json(layout.config, run)
    model: Any = build_policy(run.model, 1)
    known = model
    if by_path:
        known = run_dir.parent / "model"
        model.config.save_pretrained(known)
        model.generation_config.save_pretrained(known)
    transfer = BusWeightTransfer(run_dir, known, Words(run), lambda: version)
    transfer.init_weight_transfer()
    for step in (3, 4):
        version = V(1, step)
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        transfer.pause()
        transfer.send_weights(iter(list(model.named_parameters())))
        transfer.resume()
        found, tensors = read(run, layout)
        assert found == version
        assert same(tensors, model.state_dict())
    with pytest.raises(WeightsMismatchError, match="was not given"):
        transfer.send_weights(iter(list(model.named_parameters())[1:]))
    transfer.destroy()
    transfer.destroy()
    assert not layout.weights.exists()


def test_weight_syncs_need_a_backend_that_keeps_them(run_dir: Path) -> None:
    weights, inference = {"backend": "vllm_http"}, {"kind": "vllm"}
    run = config(weights=weights, inference=inference)
    write_json(RunLayout(run_dir).config, run)
    with pytest.raises(
        ConfigError, match=r"weights\.backend: must be posix_shm or disk with AsyncGRPOTrainer"
    ):
        BusWeightTransfer(run_dir, build_policy(run.model, 1), Words(run), lambda: V(0, 0))
