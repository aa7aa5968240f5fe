"""What can be known to fail before anything is started: said in one line, nothing left to clean up.

The user's own code is not run here: an environment's class is loaded by its worker, in its own process.
"""

import errno
import importlib.util
import math
import socket
from pathlib import Path
from typing import Final

import psutil

from rolloutmq.bus.endpoint import bind_host
from rolloutmq.bus.tokenizer import MODEL_FILE, fingerprint, vocabulary
from rolloutmq.schemas.config import InferenceConfig, RunConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, MissingError
from rolloutmq.schemas.teaching import TokenizerMismatchError, VocabularyMismatchError
from rolloutmq.services.inference.vllm.installed import require_vllm
from rolloutmq.services.worker.entry import check_entry

TRAINER_NEEDS: Final = ("torch", "transformers", "safetensors", "tokenizers")


def check(config: RunConfig) -> None:
    """Raise the first thing that would make the run fail.

    Raises:
        ConfigError: The entry of an environment names nothing, an address cannot be bound, no batch comes out even, or
            the teacher is none for this student.
        MissingError: A package that the run needs is not installed.
        AddressInUseError: Somebody listens where the inference server is to.
    """
    for name, environment in config.environment.items():
        check_entry(name, environment, config.base_dir)
    _check_batch(config)
    if config.broker.transport == "tcp":
        bind_host(config.broker)
    if config.inference.kind == "vllm":
        require_vllm(config.inference.vllm.python)
    if config.trainer.enabled or config.inference.kind in {"tiny", "vllm"}:
        for package in TRAINER_NEEDS:
            if importlib.util.find_spec(package) is None:
                raise MissingError(f"the package {package}", "pip install 'rolloutmq[trainer]'")
    if config.trainer.enabled and config.trainer.lora and importlib.util.find_spec("peft") is None:
        raise MissingError("the package peft", "`[trainer.lora]` needs it: pip install 'rolloutmq[lora]'")
    _check_device(config)
    _check_port(config.inference)
    _check_teacher(config)


def _check_device(config: RunConfig) -> None:
    if config.trainer.enabled and config.trainer.device != "cpu":
        from rolloutmq.trainer import device  # loads torch, which takes seconds

        device.find_device(config.trainer.device)


def _check_batch(config: RunConfig) -> None:
    """Refuse a batch that groups of the announced sizes never make: each step would wait for it, and be short."""
    sizes = {env.group_size for env in config.environment.values() if env.split == "train"}
    batch = config.trainer.batch_sequences
    if config.trainer.enabled and batch and sizes and batch % math.gcd(*sizes):
        told = " or ".join(map(str, sorted(sizes)))
        raise ConfigError(
            "trainer.batch_sequences", f"{batch} sequences are not made of whole groups of {told}"
        )


def _check_teacher(config: RunConfig) -> None:
    """Refuse a teacher that is not there, whose tokenizer cannot be read, or who does not fit the student.

    What a teacher elsewhere is, is seen when it is first asked; and the tokenizer of a student that is yet to be built,
    once it is built.
    """
    teacher, model = config.teacher, config.model
    if not teacher.path:
        return
    for package in TRAINER_NEEDS:
        if importlib.util.find_spec(package) is None:
            raise MissingError(f"the package {package}", "pip install 'rolloutmq[trainer]'")
    if not (Path(teacher.path) / MODEL_FILE).is_file():
        raise ConfigError("teacher.path", f"{teacher.path} is not a directory with a {MODEL_FILE}")
    theirs = fingerprint(Path(teacher.tokenizer or teacher.path))
    if model.path and (ours := fingerprint(Path(model.tokenizer or model.path))) != theirs:
        raise TokenizerMismatchError.of(theirs, ours)
    known = vocabulary(Path(model.path)) if model.path else model.vocab_size
    VocabularyMismatchError.check(config.trainer.distillation.lore, vocabulary(Path(teacher.path)), known)


def _check_port(inference: InferenceConfig) -> None:
    if inference.kind not in {"tiny", "vllm"} or inference.port == 0:
        return
    family = socket.AF_INET6 if ":" in inference.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((inference.host, inference.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    "inference.host", f"cannot bind {inference.host}:{inference.port}: {error.strerror}"
                ) from None
            address = f"{inference.host}:{inference.port} (inference.port)"
            raise AddressInUseError(address, _listener(inference.port)) from None


def _listener(port: int) -> str:
    """Say who listens on a port, as far as this user may know."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            try:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
            except psutil.Error:
                break
    return "another process"
