"""Detection of a stalled vLLM."""

from rolloutmq.services.inference.vllm.stall_detector import StallDetector


def test_it_may_stand_still_for_so_long_and_no_longer() -> None:
    one = StallDetector(10.0, now=100.0)
    assert one.left_s(104.0) == 6.0
    one.counted(7, 105.0)
    assert (one.still_s(109.0), one.left_s(109.0)) == (4.0, 6.0)
    one.counted(7, 109.0)
    assert one.left_s(114.0) == 1.0, "the same number is no step"
    assert one.left_s(116.0) == 0.0
    one.counted(8, 116.0)
    assert one.left_s(116.0) == 10.0
    one.moved(120.0)
    assert one.still_s(121.0) == 1.0
    one.counted(3, 125.0)
    assert one.still_s(126.0) == 1.0, "one that begins anew counts anew"
