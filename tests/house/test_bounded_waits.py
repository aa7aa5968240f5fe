"""Tests of vLLM wait for nobody for ever: a child that stopped itself would keep the whole suite."""

import ast
import signal
import time
from pathlib import Path

import pytest
from tests.services.inference.vllm.support.child import child

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "services" / "inference" / "vllm"


def without_bound(source: str) -> list[int]:
    """Return the lines with a wait for a process or a thread that has no limit."""
    tree = ast.parse(source)
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            found += [one.context_expr.lineno for one in node.items if name_of(one.context_expr) == "Popen"]
        if not isinstance(node, ast.Call) or id(node) in awaited:
            continue
        bounded = any(one.arg == "timeout" for one in node.keywords)
        if name_of(node) in {"wait", "join", "readline"} and not (node.args or bounded):
            found.append(node.lineno)
        if name_of(node) in {"communicate", "run", "check_call", "check_output"} and not bounded:
            called = ast.unparse(node.func)
            if name_of(node) == "communicate" or called.startswith("subprocess."):
                found.append(node.lineno)
    return sorted(found)


def name_of(call: ast.AST) -> str:
    if not isinstance(call, ast.Call):
        return ""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_each_wait_has_a_limit() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted(TESTS.rglob("*.py"))
        if (lines := without_bound(path.read_text()))
    }
    assert not found, f"lines that may wait for ever: {found}"


STOPPED = "import os, signal, sys; print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_child_that_stopped_itself_is_ended_although_the_test_fails() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match="it has said only"), child(STOPPED) as stopped:
        stopped.line(float(stopped.line() != "ready"))
    assert stopped.process.returncode == -signal.SIGKILL
    assert time.monotonic() - started < 60.0


def test_a_child_that_says_nothing_is_not_waited_for() -> None:
    with pytest.raises(AssertionError, match="it has said only b''"), child("input()") as silent:
        silent.line(0.1)
