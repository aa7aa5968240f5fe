"""Preflight checks: every error that can be found before any process of the run starts, all of them at once.

Environments are tried last, in a process of its own (`trial`): their code does not run here.
"""

import errno
import importlib.util
import math
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rolloutmq.bus.tokenizer_fingerprint import MODEL_FILE, fingerprint, vocabulary
from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.launch.endings import TRAINER_NEEDS, ProblemsError, UserCodeError, problems_of, raise_all
from rolloutmq.launch.preflight.hub import NAMED, described, lacks_dataset
from rolloutmq.launch.preflight.model_files import check_model
from rolloutmq.launch.preflight.trial import TIMEOUT_S, Tell, tried, try_environments
from rolloutmq.launch.settings import load_part
from rolloutmq.schemas.config.command import problem_of_secrets
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.run import RunConfig, TelemetryConfig
from rolloutmq.schemas.errors import (
    AddressInUseError,
    ConfigError,
    MissingError,
    RolloutMQError,
    TokenizerMismatchError,
    VocabularyMismatchError,
    install_remedy,
)
from rolloutmq.schemas.files import HubSource
from rolloutmq.schemas.network.address import LISTEN_PORTS, listen_of
from rolloutmq.services.curriculum.samplers.registry import check_samplers
from rolloutmq.services.http_server.run_token import http_token
from rolloutmq.services.http_server.tls import client_tls, problem_of_name, server_tls
from rolloutmq.services.inference.vllm.installed import require_vllm
from rolloutmq.services.monitor.text import format
from rolloutmq.services.programs.command import check_command
from rolloutmq.services.telemetry.export.packages import missing_in
from rolloutmq.services.worker.loader import check_entry


def _silent(_text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Examined:
    """What the checks found.

    Attributes:
        problems: Why the run is refused.
        failures: Exceptions and time-outs of the environments' code that the run may survive.
        advice: What could not be checked, and what a reader may want to know.
        tried: What was done with each environment that was tried, by name.
        config: The configuration, with directories for models and data sets of a hub.
        sources: These models and data sets.
    """

    problems: tuple[RolloutMQError, ...] = ()
    failures: tuple[UserCodeError, ...] = ()
    advice: tuple[UserCodeError, ...] = ()
    tried: Mapping[str, str] = field(default_factory=dict)
    config: RunConfig = field(default_factory=RunConfig)
    sources: tuple[HubSource, ...] = ()


def loaded(
    file: Path, *, environ: Mapping[str, str], assignments: Iterable[str] = (), tell: Tell = _silent
) -> RunConfig:
    """Resolve a configuration. If keys are wrong, also load the environments whose sections are valid.

    Nothing is fetched: an environment with a data set of a hub is left to `examine`.

    Raises:
        ConfigError: Something is wrong; of several errors, all.
    """
    config, problems = load_part(file, environ=environ, assignments=assignments)
    if config is not None and not problems:
        return config
    more = _of_environments(config) if config is not None else []
    if config is not None:
        more += [
            problem.error
            for verdict in try_environments(config, _loadable(config), rolled=False, tell=tell)
            for problem in verdict.problems
        ]
    raise ProblemsError([*problems, *more]) if len(problems) + len(more) > 1 else problems[0]


def check(config: RunConfig, *, known: Sequence[HubSource] = (), tell: Tell = _silent) -> Examined:
    """Examine a configuration and raise what would make the run fail: of several errors, all.

    Args:
        config: The configuration.
        known: Models and data sets of a hub that the run has used before.
        tell: Told what takes long, in one line.

    Raises:
        ConfigError: There is no environment, or one cannot work; a secret is not set, a sampler does not exist, has a
            wrong option or draws no task, an address cannot be bound, the token file has no token or is not private, no
            combination of whole groups fills a batch, the normalization of scores changes nothing, the teacher does
            not fit the student, a model is no model, or a model or data set cannot be fetched from its hub.
        MissingError: A required package is not installed.
        AddressInUseError: Another process listens on the port of the inference server.
    """
    found = examine(config, known=known, tell=tell)
    raise_all(found.problems)
    return found


def examine(
    config: RunConfig,
    *,
    known: Sequence[HubSource] = (),
    timeout_s: float = TIMEOUT_S,
    tell: Tell = _silent,
) -> Examined:
    """Run every check on a configuration.

    Blocks for as long as the modules of the environments need to load, their scripted rollouts take, and a hub needs to
    describe its models and send its data sets.

    Args:
        config: The configuration.
        known: Models and data sets of a hub that the run has used before.
        timeout_s: Time-out of the trial of each environment, in seconds.
        tell: Told what takes long, in one line.
    """
    unfetched: Sequence[RolloutMQError] = ()
    sources: tuple[HubSource, ...] = ()
    try:
        config, sources = described(config, known, tell=tell)
    except RolloutMQError as error:
        unfetched = problems_of(error)
    problems = [*_of_environments(config), *unfetched, *_of_the_run(config, sources, fetched=not unfetched)]
    verdicts = try_environments(config, _loadable(config), timeout_s=timeout_s, tell=tell)
    return Examined(
        problems=(*problems, *(one.error for verdict in verdicts for one in verdict.problems)),
        failures=tuple(one.error for verdict in verdicts for one in verdict.failures),
        advice=(
            *_advise_weights(config),
            *_lone_sequences(config),
            *_short_drains(config),
            *_advise_tls(config),
            *(one.error for verdict in verdicts for one in verdict.advice),
        ),
        tried={one.env: one.tried for one in verdicts if not one.problems and not one.failures},
        config=config,
        sources=sources,
    )


def _loadable(config: RunConfig) -> list[str]:
    """Return the environments whose trial says something new: no error of their sections is known."""
    return [
        name
        for name in tried(config)
        if not _entry_problems(config, name) and not lacks_dataset(config, name)
    ]


def _of_environments(config: RunConfig) -> list[RolloutMQError]:
    """Return what is wrong with the environments, without running their code."""
    return [problem for name in config.environment for problem in _entry_problems(config, name)]


def _entry_problems(config: RunConfig, name: str) -> list[RolloutMQError]:
    section, base_dir = config.environment[name], config.base_dir
    if section.command:
        return _raised(
            lambda: check_command(name, section.command, base_dir, is_here=config.cluster.engine == "local"),
            lambda: _check_secrets(name, section),
        )
    return _raised(lambda: check_entry(name, section, base_dir), lambda: _check_secrets(name, section))


def _of_the_run(config: RunConfig, sources: Sequence[HubSource], *, fetched: bool) -> list[RolloutMQError]:
    """Return what is wrong with everything else; `fetched` if all of `sources` could be described."""
    models = _raised(lambda: _check_model(config, sources))
    return models + _raised(
        lambda: _check_producers(config),
        lambda: check_samplers(config),
        lambda: _check_batch(config),
        lambda: _check_normalization(config),
        lambda: http_token(config),
        lambda: _check_tls(config),
        lambda: _check_listen(config),
        lambda: require_vllm(config.inference.vllm.python) if config.inference.kind == "vllm" else None,
        lambda: _check_packages(config),
        lambda: _check_inference_port(config.inference),
        lambda: _check_metrics_port(config.telemetry),
        *(partial(_raise, missing) for missing in missing_in(config.telemetry)),
        lambda: _check_teacher(config) if fetched and not models else None,
    )


def _raised(*checks: Callable[[], object]) -> list[RolloutMQError]:
    """Run checks that are independent of each other, and return what they raise."""
    found = []
    for one in checks:
        try:
            one()
        except RolloutMQError as error:
            found.append(error)
    return found


def _check_producers(config: RunConfig) -> None:
    """Reject a run whose trainer would wait for ever: nothing in it produces groups."""
    if config.environment or config.gateway.enabled or not config.trainer.enabled:
        return
    if config.orchestrator.enabled and config.inference.max_engines == 1:
        raise ConfigError(
            "environment",
            "there is none, so the trainer would wait for groups for ever; add a section [environment.NAME] with "
            "`entry`, or set orchestrator.enabled = false if producers of your own send the groups",
        )


def _check_packages(config: RunConfig) -> None:
    """Require the packages of the trainer, and its device."""
    if config.trainer.enabled or config.inference.kind in {"tiny", "vllm"}:
        for package in TRAINER_NEEDS:
            if importlib.util.find_spec(package) is None:
                raise MissingError(f"the package {package}", install_remedy("trainer"))
    if config.trainer.enabled and config.trainer.lora and importlib.util.find_spec("peft") is None:
        raise MissingError("the package peft", f"`[trainer.lora]` needs it; {install_remedy('lora')}")
    _check_device(config)


def _advise_weights(config: RunConfig) -> Iterator[UserCodeError]:
    """Tell who must publish the weights that the engines of a run without a trainer wait for."""
    kind = config.inference.kind
    if config.trainer.enabled or kind not in {"tiny", "vllm"} or not config.environment:
        return
    yield UserCodeError(
        "inference.kind",
        f'"{kind}" samples from the weights of a trainer, and trainer.enabled is false; no worker starts before a '
        "trainer beside it shares its weights (share_weights does; TRL's and SkyRL's adapters can, verl's cannot). "
        'With engines of its own set kind = "external" and url',
    )


def _lone_sequences(config: RunConfig) -> Iterator[UserCodeError]:
    """Yield each environment whose groups have one sequence, which the losses compare with nothing."""
    trainer = config.trainer
    if not trainer.enabled or trainer.distillation.teaches:
        return
    for name, environment in config.environment.items():
        if environment.split == "train" and environment.group_size == 1:
            yield UserCodeError(
                f"environment.{name}.group_size",
                "a score counts by its distance from the other scores of its group, so the trainer learns nothing from "
                "a group of one sequence (got 1); set it to at least 2, or send a column `advantages`",
            )


def _short_drains(config: RunConfig) -> Iterator[UserCodeError]:
    """Yield each environment whose rollouts may take longer than a drain waits for them."""
    limits = config.orchestrator
    for name, environment in config.environment.items() if limits.enabled else ():
        longest_s = environment.rollout_timeout_s
        if (drain_s := limits.drain_s(longest_s)) < longest_s:
            yield UserCodeError(
                "orchestrator.drain_deadline_s",
                f"{drain_s:g} s is shorter than environment.{name}.rollout_timeout_s ({longest_s:g} s), so each drain "
                "abandons rollouts that take longer; remove it, or lower the timeout",
            )


def _check_tls(config: RunConfig) -> None:
    """Require a certificate that has not ended, and that the run's own processes accept by the addresses they use."""
    tls = server_tls(config)
    if tls is None:
        return
    if tls.ends <= time.time():
        raise ConfigError("run.tls_cert", tls.end())
    trusted = client_tls(config) or ssl.create_default_context()
    for section, host in config.http_servers.items():
        name = urlsplit(http_url(host, 1)).hostname or host
        if problem := problem_of_name(tls.context, trusted, name):
            raise ConfigError(
                "run.tls_cert",
                f"processes of this host reach [{section}] as {name}, and do not accept the certificate ({problem}); "
                "name this host in it, bind a host that it names, or set run.tls_ca to its authority",
            )


def _advise_tls(config: RunConfig) -> Iterator[UserCodeError]:
    """Tell of tokens without encryption."""
    if servers := config.unencrypted:
        yield UserCodeError("run.tls_cert", format.unencrypted(servers))


def _check_secrets(name: str, environment: EnvironmentConfig) -> None:
    raters = environment.rewards.raters.items()
    options = [(f"rewards.raters.{rater}.options", section.options) for rater, section in raters]
    for key, value in (("options", environment.options), ("variables", environment.variables), *options):
        if problem := problem_of_secrets(value, os.environ):
            raise ConfigError(f"environment.{name}.{key}", problem)


def _check_device(config: RunConfig) -> None:
    if config.trainer.enabled and config.trainer.device != "cpu":
        from rolloutmq.trainer.policy import device  # imports torch, which takes seconds

        device.find_device(config.trainer.device)


def _check_batch(config: RunConfig) -> None:
    """Reject a batch size that groups of the announced sizes cannot fill: each step would wait, then be short."""
    sizes = {env.group_size for env in config.environment.values() if env.split == "train"}
    batch = config.trainer.batch_sequences
    if config.trainer.enabled and batch and sizes and batch % math.gcd(*sizes):
        choices = " or ".join(map(str, sorted(sizes)))
        raise ConfigError(
            "trainer.batch_sequences",
            f"must be a sum of whole groups of {choices} sequences (got {batch}); use a multiple of a group size",
        )


def _check_normalization(config: RunConfig) -> None:
    """Reject a divisor that cancels: `grpo` divides by the deviation of each group anyway."""
    rewards, trainer = config.trainer.rewards, config.trainer
    if not trainer.enabled or rewards.normalize == "none" or rewards.clip is not None:
        return
    if trainer.loss.advantage == "grpo":
        raise ConfigError(
            "trainer.rewards.normalize",
            f'has no effect with trainer.loss.advantage = "grpo", which divides by the deviation of each group (got '
            f'{rewards.normalize!r}); set advantage to "dr_grpo" or "rloo", set clip, or remove it',
        )


def _check_model(config: RunConfig, sources: Sequence[HubSource]) -> None:
    path = config.model.path
    if not path or (NAMED.fullmatch(path) and not Path(path).exists()):  # that the hub was asked for in vain
        return
    check_model(config, weights=all(one.key != "model" for one in sources))


def _check_teacher(config: RunConfig) -> None:
    """Reject a teacher without files, without a readable tokenizer, or with another tokenizer than the student's.

    A remote teacher is checked at its first request, and the tokenizer of a student without files once it is built.
    """
    teacher, model = config.teacher, config.model
    if not teacher.path:
        return
    for package in TRAINER_NEEDS:
        if importlib.util.find_spec(package) is None:
            raise MissingError(f"the package {package}", install_remedy("trainer"))
    if not (Path(teacher.path) / MODEL_FILE).is_file():
        raise ConfigError("teacher.path", f"{teacher.path} is not a directory with a {MODEL_FILE}")
    theirs = fingerprint(Path(teacher.tokenizer or teacher.path))
    if model.path and (ours := fingerprint(Path(model.tokenizer or model.path))) != theirs:
        raise TokenizerMismatchError.of(theirs, ours)
    known = vocabulary(Path(model.path)) if model.path else model.vocab_size
    VocabularyMismatchError.check(
        config.trainer.distillation.teacher_logprobs, vocabulary(Path(teacher.path)), known
    )


def _check_listen(config: RunConfig) -> None:
    """Require the keys of the broker's listener, and that its ports are free."""
    broker = config.broker
    if broker.keys:
        directory = KeyDirectory(config.base_dir / broker.keys)
        directory.server()
        directory.records()
    listen = listen_of(broker.listen)
    if listen is not None and listen.port:
        for port in range(listen.port, listen.port + LISTEN_PORTS):
            _check_port("broker.listen", "broker.listen", listen.host.strip("[]"), port)


def _check_inference_port(inference: InferenceConfig) -> None:
    if inference.kind in {"tiny", "vllm"}:
        _check_port("inference.host", "inference.port", inference.host, inference.port)


def _check_metrics_port(telemetry: TelemetryConfig) -> None:
    keys = ("telemetry.metrics_host", "telemetry.metrics_port")
    _check_port(*keys, telemetry.metrics_host, telemetry.metrics_port)


def _check_port(host_key: str, port_key: str, host: str, port: int) -> None:
    """Require that an address can be bound; the keys are those of its host and its port."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(host_key, f"cannot bind {host}:{port}: {error.strerror}") from None
            address = f"{host}:{port} ({port_key})"
            raise AddressInUseError(address, _listener(port)) from None


def _raise(error: RolloutMQError) -> None:
    raise error


def _listener(port: int) -> str:
    """Name the process that listens on a port, as far as this user may see it."""
    for connection in psutil.net_connections("tcp"):
        here = connection.laddr
        if connection.status == psutil.CONN_LISTEN and here and here.port == port and connection.pid:
            try:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
            except psutil.Error:
                break
    return "another process"
