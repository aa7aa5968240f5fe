"""What goes to vLLM by its own interface, and in which order; the server is made up, a real one is in test_sent."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.weights.models import built, config
from tests.trainer.weights.receiver import Server

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import WeightsMismatchError, WeightsNotSentError, WeightsTornError
from rolloutmq.trainer.weights.parcel import Parcel
from rolloutmq.trainer.weights.share import Level
from rolloutmq.trainer.weights.vllm_http import SentWeights

V = PolicyVersion


UPDATE = ["/pause?mode=keep", "/start_weight_update", "/update_weights"]


def test_weights_go_whole_between_pause_and_resume(server: Server, tmp_path: Path) -> None:
    model = built(config("qwen2"))
    sent = SentWeights.create(model, server.url, tmp_path, version=V(2, 7))
    assert server.asked[0] == "/init_weight_transfer_engine"
    server.asked.clear()
    with sent.writing(V(2, 8)), torch.no_grad():
        model.model.norm.weight.fill_(3.0)
        assert server.asked == []
    assert server.asked == [*UPDATE, "/finish_weight_update2.8", "/resume"]
    assert bool((server.received["model.norm.weight"] == 3.0).all())
    assert "lm_head.weight" not in server.received, "what is tied goes once"
    assert server.manifest == sent.manifest()
    assert (server.mode, server.held) == (0o600, True)
    assert list(tmp_path.iterdir()) == []
    assert (sent.version, sent.is_torn()) == (V(2, 8), False)
    with sent.reading() as version:
        assert version == V(2, 8)


def test_a_step_that_fails_sends_nothing_until_a_restore(server: Server, tmp_path: Path) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path, version=V(2, 7))
    server.asked.clear()
    with pytest.raises(ZeroDivisionError), sent.writing(V(2, 8)):
        raise ZeroDivisionError
    assert (sent.version, sent.is_torn()) == (V(2, 7), True)
    for attempt in (sent.writing(V(2, 8)), sent.reading()):
        with pytest.raises(WeightsTornError), attempt:
            pass
    assert server.asked == []
    with sent.writing(V(2, 7), restoring=True):
        pass
    assert server.asked[-1] == "/resume"
    assert (sent.version, sent.is_torn()) == (V(2, 7), False)


def test_a_file_without_room_is_said_and_nothing_is_paused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path, version=V(2, 7))
    server.asked.clear()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Parcel, "write", full)
    with pytest.raises(WeightsNotSentError, match="No space left"), sent.writing(V(2, 8)):
        pass
    assert server.asked == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_transfer_that_fails_leaves_it_paused_until_a_restore(
    server: Server, tmp_path: Path, failing: str
) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path)
    server.failing = failing
    server.asked.clear()
    with pytest.raises(WeightsNotSentError, match="status 500, no room"), sent.writing(V(0, 1)):
        pass
    assert "/resume" not in server.asked
    assert list(tmp_path.iterdir()) == []
    server.failing = ""
    for attempt in (sent.writing(V(0, 2)), sent.reading()):
        with pytest.raises(WeightsTornError), attempt:
            pass
    with sent.writing(V(1, 0), restoring=True):
        pass
    assert server.asked[-1] == "/resume"
    assert (sent.version, sent.is_torn()) == (V(1, 0), False)


def test_another_model_is_named_before_anything_is_paused(server: Server, tmp_path: Path) -> None:
    server.mismatch = {"tensor": "model.norm.weight", "problem": "shape is (3,)"}
    with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight: shape is"):
        SentWeights.create(built(config("llama")), server.url, tmp_path)
    assert server.asked == []


def test_what_it_holds_is_compared_tensor_by_tensor(server: Server, tmp_path: Path) -> None:
    sent = SentWeights.create(built(config("llama")), server.url, tmp_path)
    assert sent.verify(Level.MANIFEST).digests == {}
    server.digests = sent._fused_digests(exact=False)
    assert sent.verify(Level.DIGESTS).digests == server.digests
    server.digests["model.layers.1.mlp.gate_up_proj.weight"] = "another"
    with pytest.raises(WeightsMismatchError, match="gate_up_proj"):
        sent.verify(Level.DIGESTS)
    with pytest.raises(ValueError, match="equal logits"):
        sent.verify(Level.LOGITS)


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"results": []}', b'{"results": [null]}'])
def test_an_answer_that_is_none_is_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(SentWeights, "_post", lambda *_given, **_named: answer)
    with pytest.raises(WeightsNotSentError, match="match_weights was answered by something else") as caught:
        SentWeights.create(built(config("llama")), server.url, tmp_path)
    assert not caught.value.away


def test_a_server_that_is_away(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:1", f"unix:{tmp_path}/nobody"):
        with pytest.raises(WeightsNotSentError, match="Error"):
            SentWeights.create(built(config("llama")), url, tmp_path)
