from hypothesis import given
from hypothesis import strategies as st
from tests.services.broker.bench import header

from rolloutmq.schemas.wire.replies import GAP_WINDOW
from rolloutmq.services.broker.flow.sequence_window import SequenceWindow


def numbers(window: SequenceWindow) -> set[int]:
    """Return the numbers an ack of the window covers."""
    bits = int.from_bytes(window.gaps(), "little")
    above = {window.cumulative + 2 + i for i in range(bits.bit_length()) if bits >> i & 1}
    return above | set(range(1, window.cumulative + 1))


@given(st.permutations(range(1, 30)), st.lists(st.integers(1, 29), max_size=20))
def test_any_order_with_duplicates_is_told_exactly(order: list[int], again: list[int]) -> None:
    window = SequenceWindow()
    accepted: set[int] = set()
    cumulative = 0
    for seq in [*order[:20], *again, *order[20:]]:
        head = header(seq, seq * 100)
        assert (window.refusal(head) == "duplicate") == (seq in accepted)
        if seq not in accepted:
            window.accept(head.seq, head.position, head.nbytes)
            accepted.add(seq)
        window.validate()
        assert numbers(window) == accepted
        assert window.cumulative >= cumulative
        cumulative = window.cumulative
    assert window.accepted == len(accepted)
    assert window.nbytes == 100 * len(accepted)


def test_beyond_the_window_is_refused_and_memory_is_bounded() -> None:
    window = SequenceWindow()
    last = GAP_WINDOW
    assert window.refusal(header(last + 1, 10**6)) == "beyond_window"
    for seq in range(2, last + 1):
        window.accept(seq, seq * 100, 100)
    assert len(window.gaps()) <= GAP_WINDOW // 8
    assert window.cumulative == 0
    window.accept(1, 100, 100)
    assert (window.cumulative, window.gaps()) == (last, b"")


def test_positions_must_agree_with_sizes() -> None:
    window = SequenceWindow()
    assert window.refusal(header(1, 99)) == "position"
    assert window.refusal(header(1, 101)) == "position"
    assert window.refusal(header(3, 101)) == "position"
    assert window.refusal(header(3, 102)) == ""
    window.accept(1, 100, 100)
    assert window.refusal(header(2, 100)) == "position"
    assert window.refusal(header(1 << 62, 1 << 62)) == "beyond_window"
