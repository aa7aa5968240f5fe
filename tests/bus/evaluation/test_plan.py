"""The plan of a point."""

from rolloutmq.bus.evaluation.plan import plan


def test_each_task_is_asked_once_greedily_and_once_for_samples() -> None:
    planned = plan("p", ["a", "b"], tasks=2, samples=3, greedy=True)
    assert [(one.env, one.index, one.greedy, one.size) for one in planned] == [
        ("a", 0, True, 1),
        ("a", 0, False, 3),
        ("b", 0, True, 1),
        ("b", 0, False, 3),
        ("a", 1, True, 1),
        ("a", 1, False, 3),
        ("b", 1, True, 1),
        ("b", 1, False, 3),
    ]
    assert len({one.id for one in planned}) == 8
    assert all(one.id.startswith("p/") for one in planned)


def test_either_kind_can_be_left_out() -> None:
    assert [one.greedy for one in plan("p", ["a"], tasks=2, samples=0, greedy=True)] == [True, True]
    assert [one.size for one in plan("p", ["a"], tasks=2, samples=4, greedy=False)] == [4, 4]
