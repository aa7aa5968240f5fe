"""Workers are spread over fit GPUs, and where none is fit the reason is told."""

from dataclasses import replace

import pytest
from tests.services.orchestrator.gpus.traces import GIB, LIMITS

from rolloutmq.services.orchestrator.gpus.placement import GpuRequest, NoGpu, Placement, Unfit, choose, unfit

EMPTY = Placement(
    "GPU-1",
    used_bytes=0,
    free_bytes=79 * GIB,
    total_bytes=80 * GIB,
    reserved_bytes=GIB,
    busy_percent=0.0,
)
SMALL = GpuRequest(1, 10 * GIB)
WHOLE = GpuRequest(1)


@pytest.mark.parametrize(
    ("change", "need", "why"),
    [
        ({}, SMALL, None),
        ({}, WHOLE, None),
        ({"cordoned": True}, SMALL, Unfit.CORDONED),
        ({"fresh": False}, SMALL, Unfit.SILENT),
        ({"allowed": False}, SMALL, Unfit.NOT_ALLOWED),
        ({"whole": False}, SMALL, Unfit.DIVIDED),
        ({"alone": True, "workers": 1}, SMALL, Unfit.TAKEN),
        ({"workers": 1}, WHOLE, Unfit.TAKEN),
        ({"workers": 3}, SMALL, None),
        ({"used_bytes": 76 * GIB}, SMALL, Unfit.FULL),
        ({"used_bytes": 75 * GIB}, SMALL, None),
        ({"busy_percent": 98.0}, SMALL, Unfit.BUSY),
        ({"busy_percent": 97.9}, SMALL, None),
        ({"busy_percent": float("nan")}, SMALL, None),
        ({"free_bytes": 10 * GIB}, SMALL, None),
        ({"free_bytes": 10 * GIB - 1}, SMALL, Unfit.MEMORY),
        ({"free_bytes": 15 * GIB, "promised_bytes": 6 * GIB}, SMALL, Unfit.MEMORY),
        ({"claimed_bytes": 69 * GIB}, SMALL, None),
        ({"claimed_bytes": 70 * GIB}, SMALL, Unfit.MEMORY),
        ({"free_bytes": None, "total_bytes": None, "used_bytes": None}, SMALL, Unfit.MEMORY),
        ({"free_bytes": None, "total_bytes": None, "used_bytes": None}, WHOLE, None),
    ],
)
def test_what_makes_a_gpu_unfit(change: dict[str, object], need: GpuRequest, why: Unfit | None) -> None:
    assert unfit(need, replace(EMPTY, **change), LIMITS) is why  # type: ignore[arg-type]


def test_workers_are_spread_and_go_where_most_is_free() -> None:
    places = [
        replace(EMPTY, uuid="GPU-a", workers=1),
        replace(EMPTY, uuid="GPU-b", free_bytes=20 * GIB),
        replace(EMPTY, uuid="GPU-c", free_bytes=30 * GIB),
    ]
    assert choose(SMALL, places, LIMITS) == ("GPU-c",)
    assert choose(GpuRequest(3, GIB), places, LIMITS) == ("GPU-c", "GPU-b", "GPU-a")


def test_the_order_of_the_list_does_not_matter() -> None:
    places = [replace(EMPTY, uuid=f"GPU-{name}") for name in "cab"]
    assert choose(SMALL, places, LIMITS) == choose(SMALL, places[::-1], LIMITS) == ("GPU-a",)


def test_no_placement_has_a_reason() -> None:
    places = [
        EMPTY,
        replace(EMPTY, uuid="GPU-2", cordoned=True),
        replace(EMPTY, uuid="GPU-3", cordoned=True),
        replace(EMPTY, uuid="GPU-4", free_bytes=GIB),
    ]
    assert choose(GpuRequest(2, 10 * GIB), places, LIMITS) == NoGpu(
        "no_gpu: 1 of 2 wanted; 2 cordoned, 1 without enough memory, 10240 MiB wanted, 1024 MiB available"
    )
    assert choose(GpuRequest(2), [EMPTY], LIMITS) == NoGpu("no_gpu: 1 of 2 wanted; there are no others")
    assert choose(SMALL, [], LIMITS) == NoGpu("no_gpu: no GPU reported")
