"""Dead letters on a page: the list, and contents as text; bounded, and damaged ones named."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.services.broker.journal.handmade import SESSION, Handmade, flip
from tests.services.dashboard.browser import Browser
from tests.services.dashboard.serving import opened
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rolloutmq.bus.encoding.codec import encode_group, header_of
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup
from rolloutmq.services.dashboard.dead_letters import CONTENTS_LIMIT_BYTES, TOKENS_LIMIT

WORDS = {"<s>": 0, "3": 1, "1": 2, "2": 3, "=": 4, "\u202e<script>": 5}


def bury(layout: RunLayout, order: int, group: Group, *, kept: bool = True, reason: str = "lost") -> None:
    encoded = encode_group(group, 1 << 24)
    stored = StoredGroup(
        header=header_of(group, encoded, seq=order, position=order * encoded.nbytes),
        env="sort3",
        split=Split.TRAIN,
        run="run",
        producer="sort3-0",
        session=SESSION,
        table=encoded.table,
        body=GroupBody(encoded.frames, encoded.nbytes),
        accepted_at=0.0,
        accepted_wall=1002.0,
        order=order,
    )
    store = DeadLetterStore(layout.dead, 1 << 30, sync=False)
    assert store.bury(stored, encoded.frames if kept else None, reason, 2100.0 + order)


def made_group(name: str, ended: Any = 1001.0, **columns: Any) -> Group:
    known: dict[str, Any] = {
        "tokens": [[1, 2, 4, 3], [1, 5]],
        "mask": [[0, 0, 1, 1], [0, 1]],
        "scores": [0.25, 1.0],
        "inference_logprobs": [[0.0, 0.0, -0.5, -1.5], [0.0, -2.0]],
        "advantages": [[0.0, 0.0, 0.5, 1.5], [0.0, -1.0]],
    }
    return Group.build(
        name,
        **{**known, **columns},
        oldest=PolicyVersion(1, 2),
        started_at=ended and 1000.0,
        finished_at=ended,
    )


@pytest.fixture
def run(run_dir: Path) -> RunLayout:
    """A run with three dead groups: one whole, one without contents, one whose letter is damaged; and a tokenizer."""
    layout = Handmade(run_dir).layout
    bury(layout, 1, made_group("g/1"), reason="lost \u202ethrice")
    bury(layout, 2, made_group("g2", ended=0.0), kept=False)
    bury(layout, 3, made_group("g3"))
    flip(sorted(layout.dead.iterdir())[2], 30)
    layout.model.mkdir()
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="<s>"))
    tokenizer.save(str(layout.model / "tokenizer.json"))
    return layout


@pytest.fixture
def page(run: RunLayout) -> Iterator[Browser]:
    with opened(run.root) as browser:
        yield browser


def test_the_list_is_newest_first_and_names_the_damaged(page: Browser) -> None:
    told = page.get("/api/dead").json
    assert told["total"] == 3
    assert [row["order"] for row in told["rows"]] == [3, 2, 1]
    assert "damaged" in told["rows"][0]["damaged"]
    assert "group_id" not in told["rows"][0]
    assert [row["kept"] for row in told["rows"][1:]] == [False, True]
    first = told["rows"][2]
    assert (first["group_id"], first["reason"], first["sequences"], first["tokens"]) == (
        "g/1",
        "lost \u202ethrice",
        2,
        6,
    )
    assert [row["order"] for row in page.get("/api/dead?offset=1&limit=1").json["rows"]] == [2]
    assert page.get("/api/dead?offset=9").json["rows"] == []
    assert page.state()["dead"] == {"count": 3}


@pytest.mark.parametrize("asked", ["/api/dead/g%2F1", "/api/dead/g%2F1?order=1"])
def test_the_contents_are_text_by_their_mask(page: Browser, asked: str) -> None:
    told = page.get(asked).json
    assert (told["problem"], told["tokenizer"], told["sequences_total"]) == ("", "the run's tokenizer", 2)
    first, second = told["sequences"]
    assert (first["score"], first["advantage"], first["tokens_total"], first["cut"]) == (0.25, 1.0, 4, False)
    assert first["pieces"] == [
        {
            "text": "3 1",
            "trained": False,
            "tokens": 2,
            "ids": [],
            "logprob_mean": 0.0,
            "advantage_mean": 0.0,
        },
        {
            "text": "= 2",
            "trained": True,
            "tokens": 2,
            "ids": [],
            "logprob_mean": -1.0,
            "advantage_mean": 1.0,
        },
    ]
    assert second["pieces"][1]["text"] == "\u202e<script>"
    assert {"tokens", "mask", "scores"} <= {column["name"] for column in told["columns"]}
    assert any("dead after" in line for line in told["history"])


def test_a_rollout_without_times_is_left_out(page: Browser) -> None:
    known, unknown = (page.get(f"/api/dead/{name}").json["history"] for name in ("g%2F1", "g2"))
    assert [line.partition("  ")[2][:13] for line in known[:2]] == ["rollout began", "rollout ended"]
    assert len(unknown) == len(known) - 2
    assert not any("rollout" in line for line in unknown)


def test_some_sequences_of_many(page: Browser) -> None:
    told = page.get("/api/dead/g%2F1?sequence=1&limit=1").json
    assert [one["index"] for one in told["sequences"]] == [1]
    assert page.get("/api/dead/g%2F1?sequence=99").json["sequences"] == []


def test_a_letter_without_contents_and_one_that_is_not_there(page: Browser) -> None:
    told = page.get("/api/dead/g2?order=2").json
    assert (told["problem"], told["sequences"]) == ("its contents were not kept", [])
    for missing in ("g9", "g2?order=1", "g3", "g3?order=3", "g2?order=77"):
        assert page.get(f"/api/dead/{missing}").status == 404, missing


def test_without_a_tokenizer_the_tokens_are_numbers(run: RunLayout) -> None:
    (run.model / "tokenizer.json").write_text('{"model": 3}')
    with opened(run.root) as page:
        told = page.get("/api/dead/g%2F1").json
        assert told["tokenizer"].startswith("none: ")
        assert (
            told["sequences"][0]["pieces"][0] | {"ids": [1, 2], "text": ""}
            == told["sequences"][0]["pieces"][0]
        )
        (run.model / "tokenizer.json").unlink()
        assert page.get("/api/dead/g%2F1").json["tokenizer"].startswith("none: ")


def test_a_long_sequence_is_cut(run: RunLayout) -> None:
    long = TOKENS_LIMIT + 10
    columns = {"tokens": [[1] * long, [1]], "mask": [[0] + [1] * (long - 1), [1]]}
    bury(run, 4, made_group("long", **columns, inference_logprobs=None, advantages=None))
    with opened(run.root) as page:
        told = page.get("/api/dead/long?order=4").json["sequences"][0]
    assert (told["cut"], told["tokens_total"]) == (True, long)
    assert sum(piece["tokens"] for piece in told["pieces"]) == TOKENS_LIMIT
    assert told["advantage"] is None


def test_a_file_that_is_too_large_is_not_read(run: RunLayout) -> None:
    bury(run, 4, made_group("large"))
    with (run.dead / "000000000004.rmq").open("r+b") as file:
        file.truncate(CONTENTS_LIMIT_BYTES + 1)
    with opened(run.root) as page:
        assert "too many" in page.get("/api/dead/large?order=4").json["problem"]


def test_any_damage_is_a_problem_and_no_failure(run: RunLayout) -> None:
    chance = random.Random(5)
    whole = (run.dead / "000000000001.rmq").read_bytes()
    with opened(run.root) as page:
        for _ in range(100):
            changed = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            end = chance.choice((len(changed), chance.randrange(len(changed))))
            (run.dead / "000000000001.rmq").write_bytes(changed[:end])
            assert page.get("/api/dead").status == 200
            answer = page.get("/api/dead/g%2F1?order=1")
            assert answer.status in {200, 404}
            assert answer.status == 404 or answer.json["sequences"] or answer.json["problem"]
