"""GPU settings are validated together, and orders name a GPU."""

import msgspec
import pytest
from pydantic import ValidationError

from rolloutmq.bus.encoding import codec
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.wire.hardware import Cause, CordonGpu, GpuStanding


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"environment": {"e": {"entry": "m:C", "vram_bytes": 1}}},
            "set gpus to the number of GPUs for each worker",
        ),
        ({"environment": {"e": {"entry": "m:C", "gpus": -1}}}, "greater than or equal to 0"),
        ({"hardware": {"hot_samples": 6}}, "hot_samples must not exceed hot_window 5"),
        ({"hardware": {"clean_s": 4000}}, "clean_s must not exceed hold_off_max_s 3600"),
        ({"hardware": {"breaker": 0.0}}, "greater than 0"),
        (
            {"environment": {"e": {"entry": "m:C", "gpus": 1}}, "telemetry": {"interval_s": 3}},
            "hardware.stale_s: must be at least two telemetry.interval_s, 6 s",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RunConfig.model_validate(values)


def test_slow_samples_are_fine_where_no_worker_has_a_gpu() -> None:
    values = {"environment": {"e": {"entry": "m:C"}}, "telemetry": {"interval_s": 60}}
    assert RunConfig.model_validate(values).environment["e"].gpus == 0


@pytest.mark.parametrize("gpu", ["", "GPU 1", "-1", "x" * 97, "GPU-1\n"])
def test_an_order_for_what_is_no_gpu_is_refused_on_the_wire(gpu: str) -> None:
    with pytest.raises(WireError):
        codec.decode_request(codec.encode(CordonGpu(gpu=gpu)))


def test_a_standing_travels_as_an_event() -> None:
    standing = GpuStanding(uuid="GPU-1", host="h", name="n", at=1.0, causes=(Cause.HEAT,), holders=("w-0",))
    assert codec.decode_event(codec.encode(standing)) == standing
    assert msgspec.json.decode(msgspec.json.encode(standing), type=GpuStanding).cordoned
