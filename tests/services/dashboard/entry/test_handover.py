"""Secrets that outlive a server."""

import os

import msgspec
import pytest

from rolloutmq.services.dashboard.entry.handover import Secrets, create, opened


def test_the_next_server_knows_that_the_token_was_used() -> None:
    fd = create(Secrets("token", b"key"))
    try:
        cookie = opened(fd).exchange("token") or ""
        again = opened(fd)
        assert again.holder(cookie) == ""
        assert again.exchange("token") is None
    finally:
        os.close(fd)


def test_a_server_that_took_none_leaves_it_to_the_next() -> None:
    fd = create(Secrets("token", b"key"))
    try:
        assert opened(fd).exchange("wrong") is None
        assert opened(fd).exchange("token") is not None
    finally:
        os.close(fd)


def test_another_file_is_none() -> None:
    fd = os.memfd_create("nothing")
    try:
        with pytest.raises(msgspec.DecodeError):
            opened(fd)
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        opened(fd)
