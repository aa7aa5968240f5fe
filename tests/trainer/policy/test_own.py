"""The model and the weights of a run, by public names, as a trainer of one's own takes them."""

from pathlib import Path

import pytest
import torch

from rolloutmq import MissingError, PolicyVersion, SegmentInUseError, run_policy, share_weights
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.inference.tiny.policy import ServedPolicy
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.posix_shm import WeightShare

SMALL = {"hidden_size": 16, "layers": 1, "mlp_size": 16}


@pytest.fixture(params=["posix_shm", "disk"])
def layout(run_dir: Path, request: pytest.FixtureRequest) -> RunLayout:
    config = {"model": SMALL, "trainer": {"enabled": False}, "weights": {"backend": request.param}}
    write_json(RunLayout(run_dir).config, validate(config))
    return RunLayout(run_dir)


def test_an_engine_serves_what_a_trainer_shares(layout: RunLayout) -> None:
    policy = run_policy(layout.root)
    assert not policy.training
    with share_weights(str(layout.root), policy, PolicyVersion(1, 5)) as weights:
        served = ServedPolicy.attach(layout, max_rows=4, seed=0)
        assert served is not None
        assert served.version == PolicyVersion(1, 5)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        policy(input_ids=torch.tensor([[1, 5, 6]])).logits.sum().backward()
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        with weights.writing(PolicyVersion(1, 6)):
            optimizer.step()
        assert isinstance(served._share, WeightShare | DiskShare)
        with served._share.reading() as version:
            assert version == PolicyVersion(1, 6)
            for name, tensor in served._policy.state_dict().items():
                assert torch.equal(tensor, policy.state_dict()[name])
            assert not all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
        served.close()


def test_a_second_trainer_is_refused(layout: RunLayout) -> None:
    policy = run_policy(layout.root)
    with (
        share_weights(layout.root, policy),
        pytest.raises(SegmentInUseError),
        share_weights(layout.root, run_policy(layout.root)),
    ):
        raise AssertionError("shared twice")


def test_a_directory_without_a_run_is_told(run_dir: Path) -> None:
    with pytest.raises(MissingError, match="rolloutmq up"):
        run_policy(run_dir)
    with pytest.raises(MissingError), share_weights(run_dir, torch.nn.Linear(1, 1)):
        raise AssertionError("shared nothing")
