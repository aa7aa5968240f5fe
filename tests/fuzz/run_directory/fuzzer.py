"""The fuzzer of the run directory: one file of a run is damaged, and all who read it read it.

A reader gives a value, or one of the errors that its docstring names: an error of this package; for a reader of JSON
`msgspec.DecodeError`; a refusal of the file system that names the file, which the command line turns into an error of
this package.
"""

import asyncio
import contextlib
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from tests.fuzz.campaign import Fuzzer
from tests.fuzz.decoders import OWNER
from tests.fuzz.mutations import mutate, some_edits
from tests.fuzz.recovery.tree import Kind, Odd, lay
from tests.fuzz.run_directory.files import PRODUCER, run_directory
from tests.fuzz.values import mutated
from tests.services.broker.journal.journals import acceptances

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.files import read_regular
from rolloutmq.bus.producer import spool_file
from rolloutmq.bus.producer.ack_log import AckLog
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.rundir import load_run, read_json, read_lives, read_run
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.tokenizer_fingerprint import fingerprint, vocabulary
from rolloutmq.bus.transport.bindings import claim
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.launch import results, rundir
from rolloutmq.launch.commands.records import explain, ledger
from rolloutmq.launch.preflight.hub import sources_of
from rolloutmq.launch.settings import load
from rolloutmq.schemas.config.run import RunSection
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import GatewayAddress, InferenceAddress, RunLayout, SettledBatch, VllmAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.io.line_log import LineLog
from rolloutmq.services.broker.snapshots import memory_snapshot
from rolloutmq.services.dashboard.record.record_file import RecordFile
from rolloutmq.services.dashboard.record.run_record import RunRecord
from rolloutmq.services.dashboard.run_files import read_config, read_files
from rolloutmq.services.dashboard.state import Reading, Shown, sections
from rolloutmq.services.dashboard.stream import encoded_json
from rolloutmq.services.gateway import server as gateway_server
from rolloutmq.services.gateway.atropos_wire import RegisterEnv
from rolloutmq.services.gateway.in_doubt import InDoubt
from rolloutmq.services.gateway.registry import Registry
from rolloutmq.services.gateway.service import registrations_of
from rolloutmq.services.http_server.run_token import http_token
from rolloutmq.services.inference import server as inference_server
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.liveness import fate_of
from rolloutmq.services.monitor.report.bias_table import table
from rolloutmq.services.monitor.report.history import History, read_history
from rolloutmq.services.monitor.report.metrics import read_metrics
from rolloutmq.services.monitor.report.settled_log import read_trainer_log
from rolloutmq.services.monitor.report.summary import summarise
from rolloutmq.services.monitor.status import gpus, record_view, waits, worker_view
from rolloutmq.services.monitor.status.ended import ended_text, read_summary
from rolloutmq.services.monitor.status.lately import read_lately
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.services.monitor.text.logs import Follower
from rolloutmq.services.orchestrator.autoscaling import decision_log
from rolloutmq.services.orchestrator.supervision.supervisor import identities_of
from rolloutmq.services.process.lock import only_one
from rolloutmq.services.process.logbook import LogLimits, last_lines, rotate
from rolloutmq.services.process.run_lives import ended_lives
from rolloutmq.services.telemetry.recorder import Recorder
from rolloutmq.services.telemetry.server import processes_of
from rolloutmq.trainer import checkpoint
from rolloutmq.trainer.files import checkpoints as checkpoint_files
from rolloutmq.trainer.trained_log import PolicyAncestry, TrainedLog
from rolloutmq.trainer.weights import address

Reader = Callable[[RunLayout], object]
CONFIG: Final = "config.toml"
"""It is no file of the run directory: a user may give a pipe."""
DIGEST: Final = bytes([1]) * 16
EPOCH_BITS: Final = 63


class Readers(NamedTuple):
    """All who read the files of a pattern, and the errors that they document beside those of this package."""

    pattern: str
    errors: tuple[type[Exception], ...]
    readers: Sequence[Reader]


class RunDirectoryFuzzer(Fuzzer):
    """Damages one file of `files`."""

    name = "run-directory"

    def attempt(self, rng: random.Random) -> str:
        """Damage one file, and let its readers read it."""
        tree = dict(run_directory())
        table = rng.choice(TABLE)
        name = rng.choice([name for name in tree if fnmatch(name, table.pattern)])
        tree[name], self._what = _damaged(tree, name, rng)
        self._tree = tree
        with tempfile.TemporaryDirectory() as directory:
            for number, reader in enumerate(table.readers):
                root = Path(directory) / f"run{number}"  # some move a damaged file aside
                lay(tree, root)
                _read(reader, RunLayout(root), table.errors)
        return ""

    def keep(self, directory: Path) -> str:
        """Lay the damaged run directory once more."""
        lay(self._tree, directory / "run")
        return self._what


def _read(reader: Reader, layout: RunLayout, errors: tuple[type[Exception], ...]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            reader(layout)
        except RolloutMQError as error:
            str(error)
        except errors:
            return
        except OSError as error:
            if error.filename is None:
                raise


def _damaged(tree: dict[str, bytes | Odd], name: str, rng: random.Random) -> tuple[bytes | Odd, str]:
    """Return what takes the place of a file, and a text about it."""
    data = tree[name]
    assert isinstance(data, bytes)
    if rng.random() < 0.06 and name != CONFIG:
        odd = Odd(rng.choice(tuple(Kind)), rng.choice((name.rpartition("/")[2], "nowhere", ".", "/dev/null")))
        return odd, f"{name}: {odd}"
    if name.endswith((".json", ".jsonl", "/lock")) and rng.random() < 0.75:
        changed = _other_json(data, rng)
    else:
        others = [one for one in tree.values() if isinstance(one, bytes)]
        changed = mutate(data, some_edits(rng, 5), others)
    return changed, f"{name}: {changed[:3000]!r}"


def _other_json(data: bytes, rng: random.Random) -> bytes:
    """Change values in some lines, or in the whole, if that is one value."""
    try:
        return _encoded(mutated(msgspec.json.decode(data), rng), rng)
    except UNREADABLE:
        lines = data.split(b"\n")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        with contextlib.suppress(*UNREADABLE):
            lines[at] = _encoded(mutated(msgspec.json.decode(lines[at]), rng), rng)
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return b"\n".join(lines)


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
HOSTILE: Final = (
    b'"\xff\xfe"', b"[" * 3000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000, b"9" * 5000, b"1e999", b"NaN", b'"\\ud800"',
    b"18446744073709551616", b"", b"null", b"{}", b"[]", b'"\\u0000"', b"1" * 30,
)  # fmt: skip
"""Texts that no writer writes, in place of a value."""


def _encoded(value: Any, rng: random.Random) -> bytes:
    """Encode a value, sometimes with a hostile text in place of a part."""
    try:
        text = msgspec.json.encode(value, enc_hook=str)
    except (OverflowError, TypeError):
        return rng.choice(HOSTILE)
    if rng.random() < 0.3:
        numbers = [at for at in range(len(text)) if text[at : at + 1] == b":"]
        at = rng.choice(numbers or [0])
        ends = [end for end in (text.find(b",", at), text.find(b"}", at)) if end >= 0]
        text = text[: at + 1] + rng.choice(HOSTILE) + text[min(ends, default=len(text)) :]
    return text


# The readers


def _epoch(layout: RunLayout) -> None:
    """Be the next two brokers: an epoch goes into every message as a number of 64 bits."""
    before = 0
    for _ in range(2):
        with claim(layout) as epoch:
            assert before < epoch < 1 << EPOCH_BITS, f"epoch {epoch}"
            before = epoch


def _restored(layout: RunLayout) -> None:
    config, _ = read_run(layout.root)
    found = memory_snapshot.load(layout.saved)
    core = BrokerCore(config, epoch=1)
    core.restore(found.events, found, 1.0, 2.0)
    memory_snapshot.retire(layout.saved, found)
    memory_snapshot.save(layout.saved, core.snapshot())
    assert len(acceptances(found.events)) == len(found.ids)


def _spooled(layout: RunLayout) -> None:
    spool_file.require_own_spools(layout.spools)
    path = layout.spools / f"{PRODUCER}.rmq"
    session = SessionState(OWNER, Spool(1 << 20))
    one = spool_file.SpoolFile(path, session)
    if one.load():
        one.renew()


def _doubts(layout: RunLayout) -> None:
    """Be a gateway that gets a post in doubt again, and another one."""

    async def live() -> None:
        doubts = InDoubt(layout.doubts, 0.0)
        for digest in (DIGEST, b"x" * 16):
            post = await doubts.begin(digest, 2, asyncio.Event(), 1.0)
            assert len(post.ids) == 2, "a post with the groups of another one"
            doubts.came(post.ids)
            doubts.end(post)
        doubts.forget_batches()
        doubts.forget_old(1e9)
        doubts.close()
        InDoubt(layout.doubts, 0.0).close()

    asyncio.run(live())


def _registered(layout: RunLayout) -> None:
    """Be a gateway that registers an environment, and hears from those it knows."""
    registry = Registry(registrations_of(layout.registrations), 60.0, 0.0)
    asked = RegisterEnv(max_token_length=64, desired_name="maths", weight=1.0, group_size=2)
    registry.enrol(asked, 1.0)
    for env in registry.here():
        registry.hear(env, 2.0)
        registry.standing(env, {env.lane: 4}, 1, 4)
        registry.share(env)
    registry.vanished(1e9)
    registry.forget()


def _supervised(layout: RunLayout) -> None:
    known = worker_view.supervision_of(layout)
    rows = worker_view.joined(known, None, time.monotonic())
    msgspec.json.encode(worker_view.fields(known, rows))
    list(map(worker_view.trouble_text, rows))


def _gpus(layout: RunLayout) -> None:
    for record in gpus.read_gpus(layout).gpus:
        gpus.line(record.sample, record.standing)


def _locked(layout: RunLayout) -> None:
    """Be refused by the holder of a lock, whatever it wrote."""
    path = layout.root / "gateway.lock"
    content = read_regular(path)
    with only_one(path, "gateway"):
        path.write_bytes(content)
        with only_one(path, "gateway"):
            raise AssertionError("two hold one lock")


def _decisions(layout: RunLayout) -> None:
    try:
        decision_log.replay(decision_log.read(layout.decisions))
    except UnicodeDecodeError as error:
        raise AssertionError(error) from None


def _checkpoints(layout: RunLayout) -> None:
    checkpoint_files.saved(layout.checkpoints)
    checkpoint.latest(layout.checkpoints)
    written = layout.checkpoints / "step-000004"
    if written.is_dir():
        checkpoint.prune(written, 1, began=0, proven=set())


def _logs(layout: RunLayout) -> None:
    path = layout.log("broker")
    last_lines(path, 3)
    with Follower(path, 5) as follower:
        while follower.read():
            continue
    rotate(path, LogLimits(100, 2))


def _appended(layout: RunLayout) -> None:
    """Be the writers that go on in their logs."""
    AckLog(layout.ack_log(PRODUCER)).close()
    TrainedLog(layout.trained).close()
    Recorder(layout.metrics).flush()


def _token(layout: RunLayout) -> None:
    config, _ = read_run(layout.root)
    section = RunSection(http_token_file=layout.root.resolve() / "token")
    http_token(config.model_copy(update={"run": section}))


def _summary(layout: RunLayout) -> None:
    config, _ = read_run(layout.root)
    summarise(layout, config, saved_ids=lambda _: ())
    list(results.unread(results.survey(layout, ())))
    list(table(results.survey(layout, ()).bias))


def _witness(layout: RunLayout) -> None:
    found = ledger.witness(layout)
    for _ in (*found.acked, *found.trained):
        pass


def _settled(layout: RunLayout) -> None:
    with LineLog.open(layout.settled):
        read_trainer_log(read_lines(layout.settled, SettledBatch))


def _ended(layout: RunLayout) -> None:
    fate, summary = fate_of(layout), read_summary(layout)
    ended_text(layout, fate, summary)


def _weights(layout: RunLayout) -> None:
    segment_file.read_address(layout.weights)
    address.read_disk(layout.weights)
    address.read_sent(layout.weights)
    address.owner_lives(layout.weights)
    waits.outside(layout)
    address.sweep(layout.weights)


def _paged(layout: RunLayout) -> None:
    """Be the page of the run: it shows whatever can be read, so it has no error at all."""
    now, wall = time.monotonic(), time.time()
    try:
        record, config = RunRecord(), read_config(layout.root)
        file = RecordFile(layout.metrics, record.take, lambda: None)
        while not file.apply(file.fetch()):
            continue
        board = RunState("run", 0, 0.5, 2.0, {}) if isinstance(config, str) else RunState.of(config)
        found = read_files(layout, now, wall, None)
        board.recall(History(found.ran_s, wall, tuple(record.training())), now)
        for at, event in record.state():
            board.feed(event, now - max(0.0, wall - at))
        crew = worker_view.joined(found.supervision, None, now)
        shown = Shown("run", config, board, found, record, Reading(), crew, 1, {})
        json.loads(encoded_json([sections(shown, now, wall), record.series.since(-1)]))
    except (OSError, RolloutMQError) as error:
        raise AssertionError(error) from error


JSON: Final = (msgspec.DecodeError,)
TABLE: Final = (
    Readers("config.json", (), (lambda one: read_run(one.root), lambda one: load_run(one.root))),
    Readers(CONFIG, (), (lambda one: load(one.root / CONFIG, environ={}, assignments=()),)),
    Readers("hub.json", (), (sources_of,)),
    Readers("run.json", (), (fate_of, lambda one: fate_of(one).say(one))),
    Readers("run.json", JSON, (rundir.owner,)),
    Readers("lives.json", (), (read_lives, ended_lives)),
    Readers("ending.json", (), (rundir.end_waits,)),
    Readers("crashes.json", (), (lambda one: record_view.problem(one, 0.0, 0.0),)),
    Readers("processes.json", (), (fate_of, processes_of, lambda one: identities_of(one.processes))),
    Readers("processes.json", JSON, (rundir.recorded,)),
    Readers("workers.json", (), (processes_of, lambda one: identities_of(one.workers))),
    Readers("engines.json", (), (processes_of, lambda one: identities_of(one.engines))),
    Readers("supervision.json", (), (_supervised,)),
    Readers("gpus.json", (), (_gpus,)),
    Readers("endpoints.json", (), (lambda one: read_endpoints(one.root), endpoints_of, fate_of)),
    Readers("inference*.json", (), (engines_of, lambda one: inference_server.port_before(one.inference))),
    Readers("teacher.json", JSON, (lambda one: read_json(one.teacher, InferenceAddress),)),
    Readers("gateway.json", (), (gateway_server.port_before,)),
    Readers("gateway.json", JSON, (lambda one: read_json(one.gateway, GatewayAddress),)),
    Readers("vllm.json", JSON, (lambda one: read_json(one.vllm, VllmAddress),)),
    Readers("weights.json", (), (_weights,)),
    Readers("summary.json", (), (fate_of, _ended)),
    Readers("gateway.lock", (), (_locked,)),
    Readers("registrations.json", (), (_registered,)),
    Readers("doubts.log", (), (_doubts,)),
    Readers("trained.jsonl", (), (_summary, _witness, _appended)),
    Readers("trained.jsonl", (), (lambda one: PolicyAncestry.read(one.trained, PolicyVersion(1, 2)),)),
    Readers("settled.jsonl", (), (_settled, _witness, lambda one: list(explain.notes(one, "g1")))),
    Readers("acks/*.jsonl", (), (_summary, lambda one: list(explain.notes(one, "g1")), _appended)),
    Readers("dropped.jsonl", (), (_summary, lambda one: list(explain.notes(one, "d")))),
    Readers("metrics.jsonl", (), (lambda one: read_metrics(one.metrics), _summary, _appended)),
    Readers("metrics.jsonl", (), (read_history, read_lately)),
    Readers("*.json*", (), (_paged,)),
    Readers("decisions.jsonl", (ValueError,), (_decisions,)),
    Readers("saved.rmq", (), (_restored,)),
    Readers("spools/*", (), (_spooled,)),
    Readers("sockets/lock", (), (_epoch,)),
    Readers("checkpoints/*", (), (lambda one: checkpoint.next_incarnation(one.checkpoints), _checkpoints)),
    Readers("model/*", (), (lambda one: vocabulary(one.model), lambda one: fingerprint(one.model))),
    Readers("logs/*", (), (_logs,)),
    Readers("token", (), (_token,)),
)
