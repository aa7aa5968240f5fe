from benchmarks.harness import resident


def test_the_highest_memory_is_that_since_it_was_forgotten() -> None:
    large = bytearray(64 << 20)
    assert resident.highest_bytes() >= len(large)
    del large
    before = resident.forget_highest()
    assert resident.highest_bytes() - before < 32 << 20
    again = bytearray(b"x") * (64 << 20)
    assert resident.highest_bytes() - before >= len(again) // 2
