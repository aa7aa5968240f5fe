"""The whole configuration of a run: `[run]`, `[model]`, `[weights]`, `[telemetry]`, `[dashboard]`; rules of several."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolloutmq.schemas.config.base import MIB, Fraction, NameText, Section
from rolloutmq.schemas.config.broker import SEQUENCE_BYTES, TOKEN_BYTES, BrokerConfig
from rolloutmq.schemas.config.command import placeholders_of
from rolloutmq.schemas.config.distillation import TeacherConfig
from rolloutmq.schemas.config.environment import CurriculumConfig, EnvironmentConfig
from rolloutmq.schemas.config.evaluation import EvaluationConfig, evaluated, problem_of_evaluation
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.orchestrator import ClusterConfig, HardwareConfig, OrchestratorConfig
from rolloutmq.schemas.config.rewards import HealthConfig
from rolloutmq.schemas.config.trainer import TrainerConfig, WeightsConfig
from rolloutmq.schemas.network.address import is_loopback, problem_of_host, problem_of_weights
from rolloutmq.schemas.wire.distillation import TeacherLogprobs

PROGRAM_NAME_CHARS: Final = 48
"""Longest name of an environment with a command: the names of its workers and of their producers are longer."""


class RunSection(Section):
    """`[run]`: the name, directory and logs of the run."""

    name: NameText = "run"
    """Name of the run. The broker refuses producers and consumers of another run."""
    dir: Path = Path("runs/run")
    """Directory for logs, metrics, checkpoints and sockets, relative to the working directory."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the tasks and the sampling."""
    tracking_project: str = ""
    """Project name for an experiment tracker such as Weights & Biases. RolloutMQ only forwards it."""
    tracking_group: str = ""
    """Group name for an experiment tracker. RolloutMQ only forwards it."""
    http_token_file: Path | None = None
    """File with the token of the run's HTTP servers (gateway, engines, teacher, `/metrics`), relative to the
    configuration file. It must be yours, and closed to other users (mode 0600). Each request must then have the token,
    as `Authorization: Bearer TOKEN` or in the path, `http://HOST:PORT/t/TOKEN`. The workers of the run send it. With
    `broker.keys` the run makes such a file by itself, and each key has a token for the paths of its role, too. With
    neither, everybody who reaches a server may use it."""
    tls_cert: Path | None = None
    """Certificates (PEM), the servers' own first, for TLS of all HTTP servers of the run and of its page, relative to
    the configuration file. It must name the hosts by which clients reach them, `127.0.0.1` among them for the run's own
    processes. A renewed one is read without a restart. None: plain HTTP."""
    tls_key: Path | None = None
    """Private key (PEM, mode 0600) of `tls_cert`."""
    tls_ca: Path | None = None
    """Certificates (PEM) that the run's own clients trust, instead of those of their system."""
    http_hosts: tuple[str, ...] = ()
    """Names with a dot by which clients reach the run's HTTP servers, `*` for all. IP addresses, names without a dot
    and this machine's name need no entry, nor has a request with a valid token. Other `Host` headers are refused: a
    page could point its own name here."""
    log_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 16 * MIB
    """Size at which a process log is rotated to `NAME.log.1`. An ordinary worker takes hours to fill it."""
    log_files: Annotated[int, Field(ge=1, le=1000)] = 3
    """Rotated logs kept for each process: with 16 MiB each, at most 64 MiB with the current one."""
    log_workers: PositiveInt = 200
    """Logs kept of ended workers, for each environment. The oldest are deleted first."""

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together; set both, or none")
        return self

    @property
    def scheme(self) -> str:
        """Scheme of the HTTP servers' URLs."""
        return "http" if self.tls_cert is None else "https"


class ModelConfig(Section):
    """`[model]`: the policy, loaded from `path` or built from these numbers with random weights."""

    path: str = ""
    """Model of transformers and its tokenizer: a local directory, or the name of a model of a hub, such as
    `Qwen/Qwen2.5-0.5B-Instruct`. Empty: build a small Llama."""
    revision: str = ""
    """Branch, tag or commit of a model of a hub. Empty: its main branch. A resumed run keeps its commit."""
    tokenizer: str = ""
    """Directory of the tokenizer, if it is not in `path`."""
    name: NameText = "policy"
    """Model name at the inference server."""
    alphabet: str = "0123456789= "
    """Characters of the tokenizer of a built model, one token each. Padding, begin and end are added."""
    hidden_size: PositiveInt = 64
    """Width of a built model."""
    layers: PositiveInt = 2
    """Layers of a built model."""
    heads: PositiveInt = 2
    """Attention heads of a built model."""
    mlp_size: PositiveInt = 128
    """Width of the MLP of a built model."""
    max_positions: PositiveInt = 128
    """Longest sequence of a built model, in tokens."""
    vocab_size: PositiveInt = 32
    """Rows of the embedding of a built model: at least the alphabet and three special tokens."""
    initializer_range: PositiveFloat = 0.05
    """Standard deviation of the initial weights of a built model."""
    tie_embeddings: bool = False
    """Share the embedding with the head of a built model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the shared weights. The optimizer always works in float32."""

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.tokenizer and not self.path:
            raise ValueError("tokenizer is only allowed with model.path; a built model uses its own alphabet")
        if self.revision and not self.path:
            raise ValueError("revision is only allowed with model.path; a built model has none")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size must be a multiple of heads {self.heads} (got {self.hidden_size})")
        if (least := len(set(self.alphabet)) + 3) > self.vocab_size:
            raise ValueError(
                f"vocab_size must be at least {least}, the alphabet and 3 special tokens (got {self.vocab_size})"
            )
        return self


class TelemetryConfig(Section):
    """`[telemetry]`: samples of host, GPUs and processes, and their export to other tools."""

    interval_s: PositiveFloat = 1.0
    """Time between two samples."""
    latencies: bool = True
    """Whether processes measure the hops of groups, calls and requests, for `rolloutmq profile` and the live views."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of `/metrics` for Prometheus, with all metrics of the run. 0: none, since two runs on a machine would need
    two ports."""
    metrics_host: str = "127.0.0.1"
    """Address of `/metrics`. Another one than loopback needs tokens, by `run.http_token_file` or `broker.keys`, or
    `insecure`."""
    insecure: bool = False
    """Allow a `metrics_host` within reach of other machines without a token: everybody who reaches the address reads
    the metrics."""
    sinks: tuple[Literal["wandb", "tensorboard", "mlflow"], ...] = ()
    """Experiment trackers that get the figures of the run: one run of theirs for each run. Each needs the extra of its
    name."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline: W&B writes to the run directory, and `wandb sync` uploads it later. Online needs a login."""
    mlflow_uri: str = ""
    """Tracking server of MLflow, such as `http://mlflow:5000`. Empty: the variable `MLFLOW_TRACKING_URI`, or else the
    files `trackers/mlflow/` of the run directory."""
    trace_ratio: Fraction = 0.0
    """Part of the groups whose way is traced to `otlp_url`, chosen by their ids. 0: none."""
    otlp_url: str = "http://127.0.0.1:4318/v1/traces"
    """Receiver of traces by OTLP over HTTP, such as an OpenTelemetry collector."""


class DashboardConfig(Section):
    """`[dashboard]`: the page of a run in a browser. `up` prints its link, which opens it once."""

    enabled: bool = True
    """Listen for the page while the run goes on, on loopback. Its server starts when somebody opens the link, and ends
    when nobody looks. `rolloutmq dashboard RUN` serves the page of any run, also with this off."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the page, 0 for any free one. If another process uses it, the run goes on without its page."""


class RunConfig(Section):
    """The whole configuration of a run."""

    run: RunSection = RunSection.default()
    broker: BrokerConfig = BrokerConfig.default()
    environment: dict[NameText, EnvironmentConfig] = {}
    """`[environment.NAME]` sections by name."""
    curriculum: dict[NameText, CurriculumConfig] = {}
    """`[curriculum.NAME]` sections by the name of their environment."""
    inference: InferenceConfig = InferenceConfig.default()
    model: ModelConfig = ModelConfig.default()
    trainer: TrainerConfig = TrainerConfig.default()
    weights: WeightsConfig = WeightsConfig.default()
    teacher: TeacherConfig = TeacherConfig.default()
    evaluation: EvaluationConfig = EvaluationConfig.default()
    orchestrator: OrchestratorConfig = OrchestratorConfig.default()
    cluster: ClusterConfig = ClusterConfig.default()
    telemetry: TelemetryConfig = TelemetryConfig.default()
    hardware: HardwareConfig = HardwareConfig.default()
    gateway: GatewayConfig = GatewayConfig.default()
    dashboard: DashboardConfig = DashboardConfig.default()
    health: HealthConfig = HealthConfig.default()
    base_dir: Path = Path()
    """Directory of the configuration file; `file.py:Class` entries are relative to it. Set by the loader."""

    @model_validator(mode="after")
    def _check_packages(self) -> Self:
        """Refuse packages of several owners that are installed as one module: only one can be there."""
        named: dict[str, str] = {}
        for name, section in self.environment.items():
            module = section.module if section.verifiers else ""
            first = named.setdefault(module, section.verifiers)
            if "/" in first and "/" in section.verifiers and first != section.verifiers:
                raise ValueError(
                    f"environment.{name}.verifiers: must not be another package of the name {module} than {first}, "
                    f"because both are the same module (got {section.verifiers}); give each a run and a Python "
                    "environment of its own"
                )
        return self

    @model_validator(mode="after")
    def _agree(self) -> Self:
        shares = sum(env.min_share for env in self.environment.values())
        if shares > 1.0:
            raise ValueError(f"environment.*.min_share: must add up to at most 1 (got {shares:g})")
        if "inference" in self.environment:
            raise ValueError(
                "environment.inference: reserved name, it means the engines in `rolloutmq scale inference N`; "
                "rename the environment"
            )
        if "inference.cluster" in self.environment:
            raise ValueError(
                "environment.inference.cluster: reserved name, it means engines on a cluster; rename the environment"
            )
        if self.inference.max_engines > 1 and not self.orchestrator.enabled:
            raise ValueError(
                f"inference.max_engines: must be 1 without the orchestrator (got {self.inference.max_engines}); "
                "set orchestrator.enabled = true"
            )
        if any(env.gpus for env in self.environment.values()):
            least_s = 2 * self.telemetry.interval_s
            if self.hardware.stale_s < least_s:
                raise ValueError(
                    f"hardware.stale_s: must be at least two telemetry.interval_s, {least_s:g} s "
                    f"(got {self.hardware.stale_s:g})"
                )
        return self

    @model_validator(mode="after")
    def _run_programs(self) -> Self:
        """A program delivers through the gateway, and the orchestrator starts it."""
        for name, env in self.environment.items():
            if not env.command:
                continue
            if not (self.gateway.enabled and self.gateway.listen):
                key = "listen" if self.gateway.enabled else "enabled"
                raise ValueError(
                    f"gateway.{key}: must be true, because environment.{name}.command delivers through the gateway "
                    f"(got false); set gateway.{key} = true"
                )
            if len(name) > PROGRAM_NAME_CHARS:
                raise ValueError(
                    f"environment.{name}: the name must have at most {PROGRAM_NAME_CHARS} characters with `command` "
                    f"(got {len(name)}); shorten it"
                )
            if not self.orchestrator.enabled:
                raise ValueError(
                    f"orchestrator.enabled: must be true, because it starts environment.{name}.command (got false)"
                )
            asked = placeholders_of([*env.command, *env.variables.values()])
            inference = self.inference
            if "inference_url" not in asked or inference.kind == "external" or inference.port:
                continue
            if inference.kind == "none":
                raise ValueError(
                    f"inference.kind: must name a server, because environment.{name} has {{inference_url}} (got `none`)"
                )
            raise ValueError(
                f"inference.port: required by {{inference_url}} in environment.{name} (got 0); set a port"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _submit_chosen_tasks(cls, given: Any) -> Any:
        """Workers of an environment with a curriculum take submitted tasks, unless the section says otherwise."""
        environments = given.get("environment") if isinstance(given, dict) else None
        chosen = given.get("curriculum") if isinstance(given, dict) else None
        if not isinstance(environments, dict) or not isinstance(chosen, dict):
            return given
        derived = {
            name: {"tasks": "submitted", **env}
            for name, env in environments.items()
            if name in chosen and isinstance(env, dict) and not env.get("command")
        }
        return {**given, "environment": {**environments, **derived}}

    @model_validator(mode="after")
    def _choose_tasks(self) -> Self:
        """A curriculum needs an environment whose workers train on the numbered tasks that it submits."""
        for name in self.curriculum:
            env = self.environment.get(name)
            if env is None:
                known = ", ".join(self.environment) or "none"
                raise ValueError(
                    f"curriculum.{name}: must have the name of an environment (configured: {known})"
                )
            if env.command:
                raise ValueError(
                    f"curriculum.{name}: must not be given for a program, which chooses its own tasks "
                    f"(environment.{name}.command is set); remove it"
                )
            if env.split != "train":
                raise ValueError(
                    f"curriculum.{name}: must not be given for the split `{env.split}`, because nothing is learned "
                    "from its groups; remove it"
                )
            if not env.task_count:
                raise ValueError(
                    f"environment.{name}.task_count: is required by curriculum.{name} (got 0); set the number of "
                    "tasks that the environment can draw"
                )
            if (levels := self.curriculum[name].levels or 1) > env.task_count:
                raise ValueError(
                    f"curriculum.{name}.levels: must not exceed environment.{name}.task_count {env.task_count}, the "
                    f"number of its tasks (got {levels}); lower it"
                )
            if env.tasks != "submitted":
                raise ValueError(
                    f'environment.{name}.tasks: must be "submitted", because curriculum.{name} chooses the tasks '
                    f"(got {env.tasks}); remove the key"
                )
        return self

    @model_validator(mode="after")
    def _open_tasks(self) -> Self:
        """Beyond the broker's limit a curriculum would wait for room without end, and leave none to others."""
        total, limit = 0, self.broker.max_tasks
        for name in self.curriculum:
            total += (ahead := self.groups_ahead(name))
            if total >= limit:
                raise ValueError(
                    f"curriculum.{name}.ahead: the open tasks of all curricula must be fewer than broker.max_tasks "
                    f"{limit} (got {ahead} here, {total} in all); set a smaller number, or raise broker.max_tasks"
                )
        return self

    @model_validator(mode="after")
    def _guard_http(self) -> Self:
        for section, prefix in (
            ("gateway", ""),
            ("inference", ""),
            ("teacher", ""),
            ("telemetry", "metrics_"),
        ):
            server = getattr(self, section)
            host, insecure = getattr(server, f"{prefix}host"), server.insecure
            if problem := problem_of_host(section, host, tokens=self.asks_for_tokens, insecure=insecure):
                key, _, rest = problem.partition(" ")
                raise ValueError(f"{section}.{prefix}{key}: {rest}")
        return self

    @property
    def http_servers(self) -> dict[str, str]:
        """Bound host of each HTTP server of the run, by its section."""
        servers = {
            "gateway": self.gateway.host if self.gateway.enabled and self.gateway.listen else None,
            "inference": self.inference.host if self.inference.kind in {"tiny", "vllm"} else None,
            "teacher": self.teacher.host if self.teacher.path else None,
            "telemetry": self.telemetry.metrics_host if self.telemetry.metrics_port else None,
        }
        return {section: host for section, host in servers.items() if host is not None}

    @property
    def unencrypted(self) -> tuple[str, ...]:
        """Servers, with their hosts, that ask for tokens within reach of other machines and speak plain HTTP."""
        if not self.asks_for_tokens or self.run.tls_cert is not None:
            return ()
        servers = self.http_servers.items()
        return tuple(f"{section} ({host})" for section, host in servers if not is_loopback(host))

    @property
    def asks_for_tokens(self) -> bool:
        """Whether the HTTP servers of the run ask for a token."""
        return self.run.http_token_file is not None or bool(self.broker.keys)

    @model_validator(mode="after")
    def _guard_weights(self) -> Self:
        weights = self.weights
        if weights.backend == "stream" and (
            problem := problem_of_weights(weights.listen, self.broker.keys, insecure=weights.insecure)
        ):
            key, _, rest = problem.partition(" ")
            raise ValueError(f"weights.{key}: {rest}")
        return self

    @model_validator(mode="after")
    def _reach_who_samples(self) -> Self:
        backend, kind = self.weights.backend, self.inference.kind
        if backend == "vllm_http" and kind != "vllm":
            raise ValueError(
                f"weights.backend: `vllm_http` works only with vLLM (inference.kind is `{kind}`); "
                "use `posix_shm` or `disk`"
            )
        if backend == "disk" and kind == "vllm":
            raise ValueError("weights.backend: vLLM cannot read `disk`; use `posix_shm` or `vllm_http`")
        if backend == "disk" and kind != "tiny" and not self.trainer.enabled:
            raise ValueError(
                "weights.backend: no process of this run writes or reads weights on `disk`; use `posix_shm`"
            )
        device = self.trainer.device
        if backend == "posix_shm" and device != "cpu" and self.trainer.enabled:
            other = {"tiny": "disk", "vllm": "vllm_http"}.get(kind, "cuda_ipc")
            raise ValueError(
                f"weights.backend: `posix_shm` needs a trainer on the CPU (trainer.device is `{device}`); use `{other}`"
            )
        if backend == "cuda_ipc" and (device == "cpu" or kind == "tiny" or not self.trainer.enabled):
            raise ValueError(
                "weights.backend: `cuda_ipc` needs a trainer with device `cuda`, and vLLM or your own inference server "
                f"(trainer.device is `{device}`, inference.kind is `{kind}`)"
            )
        return self

    @model_validator(mode="after")
    def _learn_at_a_rate_of_the_model(self) -> Self:
        if self.model.path and self.trainer.enabled and "learning_rate" not in self.trainer.model_fields_set:
            raise ValueError(
                "trainer.learning_rate: is required with model.path (got none): the default is for a small model of "
                "random weights; set it, for example to 1e-6"
            )
        return self

    @model_validator(mode="after")
    def _map_one_worker(self) -> Self:
        vllm, backend = self.inference.vllm, self.weights.backend
        asked = {
            "tensor_parallel": (
                vllm.tensor_parallel,
                vllm.tensor_parallel == 1,
                "several workers cannot map",
            ),
            "compiled": (vllm.compiled, not vllm.compiled, "compiled code cannot follow"),
        }
        for key, (value, fine, why) in asked.items():
            if not fine and backend != "vllm_http":
                raise ValueError(
                    f"inference.vllm.{key}: {why} the weights of `{backend}` (got {value}); "
                    'set weights.backend = "vllm_http"'
                )
        return self

    @model_validator(mode="after")
    def _learn_from_a_teacher(self) -> Self:
        if self.teacher.enabled and self.trainer.distillation.teacher_logprobs is TeacherLogprobs.NONE:
            raise ValueError(
                "trainer.distillation.kind: must not be `none` with a teacher; set `top_k`, `full` or `sampled`"
            )
        if self.teacher.enabled and not (self.trainer.enabled or self.model.path):
            raise ValueError(
                "model.path: required for a teacher with your own trainer; "
                "name the directory of the model that you train, for its tokenizer"
            )
        return self

    @model_validator(mode="after")
    def _evaluate(self) -> Self:
        trains, starts = self.trainer.enabled, self.orchestrator.enabled
        if problem := problem_of_evaluation(self.evaluation, self.environment, trains=trains, starts=starts):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _place_workers(self) -> Self:
        """The orchestrator orders the workers of a cluster."""
        if self.cluster.engine == "local":
            return self
        if not self.orchestrator.enabled:
            raise ValueError(
                "orchestrator.enabled: must be true, because it places the workers on the cluster "
                '(got false); remove it, or set cluster.engine = "local"'
            )
        backend = self.weights.backend
        if self.places_engines and backend not in {"posix_shm", "stream"}:
            raise ValueError(
                f"weights.backend: must be posix_shm or stream where the cluster runs engines (got {backend}), because "
                "a relay sends the weights to their nodes; change it, or keep all engines on this host with "
                "cluster.place_engines = false"
            )
        return self

    @property
    def places_engines(self) -> bool:
        """Whether a cluster runs the engines beyond the first."""
        own = self.cluster
        return own.engine != "local" and own.place_engines and self.inference.max_engines > 1

    @model_validator(mode="after")
    def _leave_workers_to_others(self) -> Self:
        """Without `orchestrator.start_workers` nothing here starts, places, or counts them."""
        if self.orchestrator.start_workers:
            return self
        key = "orchestrator.start_workers"
        if self.cluster.engine != "local":
            raise ValueError(
                f"{key}: must be true where the cluster places the workers (got false); remove it, "
                'or set cluster.engine = "local"'
            )
        programs = [name for name, env in self.environment.items() if env.command]
        if programs:
            raise ValueError(
                f"{key}: must be true for environment.{programs[0]}.command, which only the run can start "
                "(got false); remove one of them"
            )
        if self.orchestrator.max_processes:
            raise ValueError(
                f"orchestrator.max_processes: bounds the workers that the run starts, and {key} is false "
                f"(got {self.orchestrator.max_processes}); use environment.NAME.max_workers"
            )
        return self

    @model_validator(mode="after")
    def _keep_workers(self) -> Self:
        least = sum(env.min_workers for env in self.environment.values())
        if 0 < self.orchestrator.max_processes < least:
            raise ValueError(
                f"orchestrator.max_processes: must be at least {least}, the sum of environment.*.min_workers "
                f"(got {self.orchestrator.max_processes})"
            )
        return self

    @model_validator(mode="after")
    def _hold_batches(self) -> Self:
        batch, tokens = self.batch_sequences, self.trainer.batch_tokens
        if self.broker.high_bytes < max(batch * SEQUENCE_BYTES, tokens * TOKEN_BYTES):
            what = f"{tokens} tokens" if tokens else f"{batch} sequences"
            raise ValueError(
                f"broker.high_bytes: too small for a batch of {what} (got {self.broker.high_bytes}); raise it"
            )
        for name, env in self.environment.items():
            if env.group_size > batch and not tokens:
                raise ValueError(
                    f"environment.{name}.group_size: must not exceed trainer.batch_sequences {batch} "
                    f"(got {env.group_size})"
                )
            if self.broker.high_groups * env.group_size < batch:
                raise ValueError(
                    f"broker.high_groups: too small for a batch of {batch} sequences in groups of "
                    f"environment.{name}.group_size {env.group_size} (got {self.broker.high_groups}); raise it"
                )
            part = max(self.part(name), env.group_size)
            if 0 < env.high_bytes < part * SEQUENCE_BYTES:
                raise ValueError(
                    f"environment.{name}.high_bytes: too small for its {part} sequences of a batch "
                    f"(got {env.high_bytes}); raise it"
                )
        return self

    @property
    def unconfigured(self) -> EnvironmentConfig:
        """Configuration of an environment that has no section of its own but a producer.

        Environments of the gateway pace themselves and know no policy versions, so nothing is dropped as stale there.
        """
        if self.gateway.enabled:
            return EnvironmentConfig(entry="gateway:Gateway", group_size=1, pacing=False, stale="pass")
        return EnvironmentConfig(entry="unknown:Unknown", group_size=1)

    def groups_ahead(self, name: str) -> int:
        """Return how many tasks of an environment's curriculum are open at most."""
        groups = -(-2 * self.part(name) // self.environment[name].group_size)
        return self.curriculum[name].ahead or max(1, groups)

    def passes(self, env: str, score: float) -> bool:
        """Return whether a score of an environment is that of an answer that passes.

        Without a `pass_score` of its own it must be exactly that of the evaluation: a higher one is of another scale.
        """
        section = self.environment.get(env)
        if section is not None and section.pass_score is not None:
            return score >= section.pass_score
        return score == self.evaluation.pass_score

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Names of the environments that answer tasks of the evaluation; none if it is off."""
        return evaluated(self.evaluation, self.environment)

    @property
    def batch_sequences(self) -> int:
        """Sequences of one step; with a token budget, the fewest that fill the budget."""
        longest = self.trainer.batch_tokens if self.model.path else self.model.max_positions
        return self.trainer.batch_sequences or max(1, self.trainer.batch_tokens // longest)

    def part(self, name: str) -> int:
        """Return the expected number of sequences of an environment in each batch, by weight or minimum share."""
        env = self.environment[name]
        peers = [peer.weight for peer in self.environment.values() if peer.split == env.split]
        share = env.weight / sum(peers) if any(peers) else 1.0 / len(peers)
        return int(self.batch_sequences * max(share, env.min_share))
