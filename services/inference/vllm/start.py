"""Launcher of vLLM's API server, in vLLM's own environment, so that it ends with its parent process.

    python start.py PARENT_PID [arguments of vllm.entrypoints.openai.api_server]

A killed supervisor cannot end its children, and an abandoned server would keep gigabytes. So the kernel kills this
process with its parent, and the engine with this process (see `extension`). Imports nothing of this package.

vLLM's endpoint for structured decisions encodes some strings at startup and ends the server if the tokenizer does not
know them, as a character tokenizer does not. Nobody here uses it, so it is disabled.
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
    """Disable that endpoint."""
    from vllm.entrypoints.generate.structured_decisions import api_router  # pyright: ignore[reportMissingImports]

    def absent(_engine: Any, state: Any, *_more: Any) -> None:
        state.serving_structured_decisions = None

    api_router.init_structured_decisions_state = absent


if __name__ == "__main__":
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    os.environ["ROLLOUTMQ_VLLM_SERVER"] = str(os.getpid())
    with contextlib.suppress(ImportError):  # another vLLM version
        without_structured_decisions()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
