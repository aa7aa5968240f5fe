"""Which node a person means."""

import pytest

from rolloutmq.launch.commands.remote.nodes import named
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import NodeRecord

NODES = [
    NodeRecord(node="abc1", host="h1"),
    NodeRecord(node="abd2", host="h2"),
    NodeRecord(node="e3", host="h2"),
]


@pytest.mark.parametrize(("given", "node"), [("abc1", "abc1"), ("abd", "abd2"), ("e", "e3"), ("h1", "abc1")])
def test_a_node_is_named_by_its_id_its_beginning_or_its_host(given: str, node: str) -> None:
    found = named(given, NODES)
    assert found is not None
    assert found.node == node


@pytest.mark.parametrize("given", ["", "GPU-1", "h3"])
def test_another_name_is_no_node(given: str) -> None:
    assert named(given, NODES) is None


@pytest.mark.parametrize(("given", "shown"), [("ab", "abc1, abd2"), ("h2", "abd2, e3")])
def test_several_nodes_are_not_guessed(given: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"several nodes match \({shown}\)"):
        named(given, NODES)
