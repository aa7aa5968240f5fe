"""Starts vLLM's API server, in vLLM's own environment, so that it ends when the one who started it does.

    python start.py PARENT_PID [arguments of vllm.entrypoints.openai.api_server]

A supervisor that is killed can end nobody, and a server that nobody watches would keep gigabytes. So the kernel is
asked to kill this process with its parent, and the engine with this process (see `extension`). Imports nothing of ours.

One endpoint of vLLM, for structured decisions, encodes words of its own when the server starts, and ends the server if
the tokenizer does not know them, as one of characters does not. It is left out: nobody here asks it.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def without_structured_decisions() -> None:
    """Let that endpoint say that it is not there."""
    from vllm.entrypoints.generate.structured_decisions import api_router

    def absent(_engine: Any, state: Any, *_more: Any) -> None:
        state.serving_structured_decisions = None

    api_router.init_structured_decisions_state = absent


if __name__ == "__main__":
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    os.environ["ROLLOUTMQ_VLLM_SERVER"] = str(os.getpid())
    with contextlib.suppress(ImportError):  # of another version
        without_structured_decisions()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
