"""Idle threads of raters end soon, for the check of leaked threads."""

import pytest

from rolloutmq.services.rewards import calls


@pytest.fixture(autouse=True)
def _short_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "IDLE_S", 0.02)
