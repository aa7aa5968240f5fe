"""Names of the files of a run directory: one place, so that every process and every reader agrees.

config.json          the resolved configuration                         written by the launcher
run.json             who owns the run directory (ProcessIdentity)       launcher
processes.json       the processes that live (list of ProcessIdentity)  launcher; workers.json: orchestrator
engines.json         the engines of them that it keeps                  orchestrator
supervision.json     each worker as the orchestrator sees it            orchestrator
gpus.json            each GPU: cordons and why, who has it, last sample  orchestrator
endpoints.json       where the broker's sockets are                     broker, once they are bound
inference.json       where the policy is served                         inference server, once it is ready
inference-1.json ... the same of further engines                        each engine, while it serves
teacher.json         where the teacher is asked                         teacher, once it is ready
gateway.json         where the HTTP interface is                        gateway, once it listens
registrations.json   its trainer and environments, and its step         gateway
doubts.log           posts that may not have been answered              gateway
weights.json         where the shared weights lie                       trainer
weights/             their versions, where they go by way of the disk   trainer
vllm.json            where vLLM is, if weights are sent to it           inference server
ranks.json           where its ranks meet, if there are several         trainer
model/               configuration and tokenizer of the policy          trainer
checkpoints/         step-000050/ ...                                   trainer
trained.jsonl        each settled batch, with the ids of its groups     trainer
acks/<worker>.jsonl  the groups that were acked: ids, and what they are like   each producer
dropped.jsonl        each group that left the queue untrained, and why  broker
saved.rmq            the state at the end, with its groups, at durability `memory`   broker
journal/             groups-00000001.rmq ..., facts-00000001.rmq ..., quarantine/  broker
dead/                one file for each dead group                       broker
metrics.jsonl        every event that was published                     telemetry
decisions.jsonl      every decision on the number of workers, with its inputs   orchestrator
logs/<name>.log      what each process printed; .log.1, .log.2, ... what it printed before, newest first
sockets/             ipc endpoints, mode 0700
summary.json, report.png                                                launcher, at the end
"""

from pathlib import Path
from typing import Final

VERSIONS: Final = "weights"
"""Directory of the versions of the weights, beside the file that says which is the newest."""


class RunLayout:
    """Paths below one run directory. Makes nothing by itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.json"
        self.owner = root / "run.json"
        self.processes = root / "processes.json"
        self.workers = root / "workers.json"
        self.engines = root / "engines.json"
        self.supervision = root / "supervision.json"
        self.gpus = root / "gpus.json"
        self.endpoints = root / "endpoints.json"
        self.inference = root / "inference.json"
        self.teacher = root / "teacher.json"
        self.gateway = root / "gateway.json"
        self.registrations = root / "registrations.json"
        self.doubts = root / "doubts.log"
        self.weights = root / "weights.json"
        self.versions = root / VERSIONS
        self.vllm = root / "vllm.json"
        self.ranks = root / "ranks.json"
        self.model = root / "model"
        self.checkpoints = root / "checkpoints"
        self.trained = root / "trained.jsonl"
        self.acks = root / "acks"
        self.dropped = root / "dropped.jsonl"
        self.saved = root / "saved.rmq"
        self.journal = root / "journal"
        self.dead = root / "dead"
        self.metrics = root / "metrics.jsonl"
        self.decisions = root / "decisions.jsonl"
        self.logs = root / "logs"
        self.sockets = root / "sockets"
        self.spools = root / "spools"
        self.summary = root / "summary.json"
        self.report = root / "report.png"

    def ack_log(self, producer: str) -> Path:
        """File of the groups of `producer` that the broker acked."""
        return self.acks / f"{producer}.jsonl"

    def engine(self, name: str) -> Path:
        """File in which an engine says where it is; that of the first is `inference`."""
        return self.root / f"{name}.json"

    def log(self, process: str) -> Path:
        """File that the process writes its output to."""
        return self.logs / f"{process}.log"
