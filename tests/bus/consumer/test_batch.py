"""How a batch shows itself in a notebook."""

from typing import Any

import pytest

from rolloutmq import Batch, BlockingBatch, Group, LeasedBatch, PolicyVersion
from rolloutmq.schemas.wire.envelope import GroupHeader
from rolloutmq.schemas.wire.replies import Delivery, Rejected


def batch_of(groups: int, kind: type[Batch] = Batch, **changes: Any) -> Batch:
    sampled = PolicyVersion(0, 5)
    made = [
        Group.build(f"<g-{at}>", tokens=[[1, 2], [3]], mask=[[0, 1], [1]], scores=[0.0, 1.0], oldest=sampled)
        for at in range(groups)
    ]
    deliveries = tuple(
        Delivery(
            header=GroupHeader(
                seq=at + 1,
                position=1,
                group_id=one.group_id,
                table="t",
                frames=1,
                nbytes=1,
                crc=0,
                sequences=one.sequences,
                tokens=one.tokens,
                oldest=one.oldest,
                newest=one.newest,
                started_at=0.0,
                finished_at=0.0,
                rewards=one.rewards(),
            ),
            env="e",
            producer="p",
            session=1,
        )
        for at, one in enumerate(made)
    )
    attributes: dict[str, Any] = {
        "groups": tuple(made),
        "deliveries": deliveries,
        "rejected": (),
        "step": 8,
        "version": PolicyVersion(0, 7),
        "lease": 1,
        "generation": 1,
        "life": 1,
        "short": False,
        "over": False,
        "rewound": False,
        "moments": {},
    }
    return kind(**attributes | changes)


def test_it_is_a_table_of_its_groups() -> None:
    shown = batch_of(2)._repr_html_()
    assert "<caption>Batch of step 8: 2 groups, 4 sequences, 6 tokens</caption>" in shown
    cells = ("&lt;g-0&gt;", "", "2", "3", "0.5", "0.5", "2", "1")
    assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in shown
    assert shown.count("<tr>") == 3
    assert "more" not in shown


def test_its_marks_are_in_the_title() -> None:
    marked = batch_of(1, short=True, rewound=True, rejected=(Rejected(group_id="g", reason="bad"),))
    title = "Batch of step 8: 1 group, 2 sequences, 3 tokens, short, rewound, 1 undecodable"
    assert f"<caption>{title}</caption>" in marked._repr_html_()


@pytest.mark.parametrize("kind", [LeasedBatch, BlockingBatch])
def test_a_large_one_stays_small(kind: type[Batch]) -> None:
    large = batch_of(5000, kind, consumer=None)
    shown = large._repr_html_()
    assert shown.count("<tr>") == 11
    assert "<p>and 4,990 more</p>" in shown
    assert len(shown) < 5000
    assert repr(large) == "<Batch of step 8: 5,000 groups, 10,000 sequences, 15,000 tokens>"
