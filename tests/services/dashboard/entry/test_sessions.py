"""Token and cookies: exchanged once, signed, and not for ever."""

import pytest

from rolloutmq.services.dashboard.entry.sessions import LIFE_S, Sessions, link


def test_a_token_is_exchanged_once() -> None:
    sessions = Sessions()
    cookie = sessions.exchange(sessions.token)
    assert cookie is not None
    assert sessions.holder(cookie) == ""
    assert sessions.exchange(sessions.token) is None


def test_a_wrong_token_uses_up_nothing() -> None:
    sessions = Sessions()
    for wrong in ("", sessions.token[:-1], f"{sessions.token}0", "\udcff", "é"):
        assert sessions.exchange(wrong) is None
    assert sessions.exchange(sessions.token) is not None


@pytest.mark.parametrize("change", ["", "x", "0.{0}", "{0}0", "{0}\udcff", "é{0}", "..", "."])
def test_a_forged_cookie_is_none(change: str) -> None:
    sessions = Sessions()
    cookie = sessions.exchange(sessions.token)
    assert sessions.holder(change.format(cookie)) is None


def test_a_cookie_ends() -> None:
    now = [1000.0]
    sessions = Sessions(wall=lambda: now[0])
    cookie = sessions.exchange(sessions.token) or ""
    now[0] += LIFE_S - 1
    assert sessions.holder(cookie) == ""
    now[0] += 2
    assert sessions.holder(cookie) is None
    now[0] = 10.0
    assert sessions.holder(cookie) is None, "of the future"


def test_another_server_knows_it_by_the_key_alone() -> None:
    first = Sessions("token", b"key")
    cookie = first.exchange("token") or ""
    assert Sessions("other", b"key").holder(cookie) == ""
    assert Sessions("token", b"another").holder(cookie) is None
    assert Sessions().holder(cookie) is None


def test_tokens_are_not_guessed() -> None:
    assert len({Sessions().token for _ in range(100)}) == 100
    assert len(Sessions().token) == 43


def test_the_token_is_in_the_fragment() -> None:
    assert link("http://127.0.0.1:80", "t") == "http://127.0.0.1:80/#token=t"
