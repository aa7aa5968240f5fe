"""The fuzzer of recovery: a damaged run directory is read by every reader, and opened as the broker opens it.

- A reader gives a result or a documented error, and changes nothing.
- Recovery gives a result or a documented error. A second one, after the first was killed or has ended, gives the same
  result.
- Without forged records no group is made up: each recovered group was written, and its bytes are those that were
  written, from recovery as from a pull.
"""

import contextlib
import io
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.fuzz.campaign import Fuzzer
from tests.fuzz.recovery.damage import Damaged, damaged
from tests.fuzz.recovery.runs import CONSUMER, Run, Written, runs
from tests.fuzz.recovery.tree import copied, lay, signature
from tests.services.broker.bench import WALL, Bench, lasting
from tests.services.broker.journal.journals import acceptances

from rolloutmq.bus.rundir import usable
from rolloutmq.launch.commands.records import dead, explain, ledger
from rolloutmq.schemas.errors import (
    ConfigError,
    DamagedJournalError,
    JournalFailedError,
    MissingError,
    RecordVersionError,
    UnusablePathError,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, Durability
from rolloutmq.schemas.wire.requests import Pull, RegisterConsumer
from rolloutmq.services.broker.actions import Reply
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.format.events import Began, Event, GroupSnapshot
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect.ledger_model import remaining_ids
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.read.trim import trim
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.broker.journal.stored_group import BodyMemory
from rolloutmq.services.broker.replay.recording import Recording
from rolloutmq.services.broker.snapshots import memory_snapshot

NOW: Final = 1000.0
RAM_BYTES: Final = 1 << 16
PULLS: Final = 6
READERS: Final = 4
"""Readers that read one damaged directory."""
DOCUMENTED: Final = (
    ConfigError,
    DamagedJournalError,
    JournalFailedError,
    MissingError,
    RecordVersionError,
    UnusablePathError,
)
"""What a reader or a start may raise here. Nothing passes by itself: JournalWaitsError would mean to wait for ever."""


class RecoveryFuzzer(Fuzzer):
    """Damages the run directories of `recovery.runs`."""

    name = "recovery"

    def attempt(self, rng: random.Random) -> str:
        """Damage one run, read it and open it."""
        run = rng.choice(runs())
        self._run, self._damaged = run, damaged(run.tree, rng)
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory) / "run"
            lay(self._damaged.tree, root)
            return check(root, run, self._damaged, rng)

    def keep(self, directory: Path) -> str:
        """Lay the damaged run directory once more."""
        lay(self._damaged.tree, directory / "run")
        forged = ", forged" if self._damaged.forged else ""
        return f"the run `{self._run.name}`{forged}: {'; '.join(self._damaged.what)}"


def check(root: Path, run: Run, found: Damaged, rng: random.Random) -> str:
    """Check all promises on a damaged run directory; return the outcome of the recovery."""
    before = signature(root)
    name = rng.choice([written.header.group_id for written in run.truth.values()])
    _read(RunLayout(root), name, rng)
    assert signature(root) == before, "a reader wrote"
    truth = None if found.forged else run.truth
    if run.config.broker.durability is Durability.MEMORY:
        return _outcome(lambda: _remember(RunLayout(root), run, truth))
    if rng.random() < 0.15:
        _outcome(lambda: _trimmed(root, run, truth))
    return _outcome(lambda: _reopen(RunLayout(root), run, truth))


def _outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except DOCUMENTED as error:
        return type(error).__name__ if str(error) else "error without a text"
    return "read"


def _read(layout: RunLayout, name: str, rng: random.Random) -> None:
    """Let some readers read the directory."""
    root = layout.root
    readers: Sequence[Callable[[], object]] = (
        lambda: verify(layout.journal, layout.dead, Witness),
        lambda: verify(layout.journal, layout.dead, Witness, quick=True),
        lambda: ledger.verify(root, as_json=True),
        lambda: ledger.verify(root, as_json=False),
        lambda: explain.explain(root, name, as_json=True),
        lambda: explain.explain(root, name, as_json=False),
        lambda: dead.show_list(root, as_json=True),
        lambda: dead.show_list(root, as_json=False),
        lambda: _show_dead(layout, rng),
        lambda: remaining_ids(layout.journal),
        lambda: memory_snapshot.load(layout.saved).ids,
        lambda: _replayed(root),
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for reader in rng.sample(readers, READERS):
            _outcome(lambda reader=reader: _by_command(reader))  # type: ignore[misc]


def _by_command(reader: Callable[[], object]) -> object:
    """Read as the command line does, which names the file that the file system refuses."""
    try:
        return reader()
    except OSError as error:
        if error.filename is None:
            raise
        raise UnusablePathError(str(error.filename), error.strerror or str(error)) from error


def _show_dead(layout: RunLayout, rng: random.Random) -> None:
    entries = DeadLetterStore(layout.dead, 0, sync=False).entries()
    letters = [entry.letter for entry in entries if entry.letter is not None]
    if letters:
        dead.show(layout.root, rng.choice(letters).group.header.group_id)


def _replayed(root: Path) -> None:
    with contextlib.closing(Recording(root, BodyMemory(RAM_BYTES))) as recording:
        recording.items()


@dataclass
class Life:
    """A core that was restored."""

    core: BrokerCore
    events: list[AnyEvent]
    problems: list[str]

    def state(self, run: Run) -> list[Event]:
        """Return what must be the same after the next restart."""
        return lasting(self.bench(run))

    def bench(self, run: Run) -> Bench:
        """Return a bench with this core."""
        bench = Bench(run.config)
        bench.core, bench.now, bench.shadowed = self.core, NOW, False
        return bench


@contextlib.contextmanager
def _life(layout: RunLayout, run: Run, epoch: int, truth: dict[int, Written] | None = None) -> Iterator[Life]:
    """Recover as the broker does, and end in order."""
    config = run.config.broker
    with usable(layout.root):
        require_own_records(layout)
        ram = BodyMemory(config.ram_bytes)
        core = BrokerCore(run.config, epoch=epoch, ram=ram)
        journal = Journal(layout.journal, config, ram, lambda: None)
        try:
            found = journal.recover()
            events = list(found.events)
            problems = core.restore(events, found, NOW, WALL)
            if truth is not None:
                core.validate()
                assert core.held_groups <= len(truth), "more groups than were written"
            undamaged = not (found.damage or problems)
            journal.start([*core.snapshot(), Began(epoch, 1, "os")], keep_old=not undamaged)
            _reconcile(core, layout, truth)
            yield Life(core, events, problems)
            journal.append(core.events())
            journal.close(snapshot=core.snapshot())
        finally:
            journal.close()


def _reconcile(core: BrokerCore, layout: RunLayout, truth: dict[int, Written] | None) -> None:
    """Look at the dead letters as the broker does at its start, and at their contents."""
    store = DeadLetterStore(layout.dead, 1 << 20, sync=False)
    for entry in list(store.entries()):
        letter = store.open(entry.order)
        if truth is not None and letter is not None and letter.frames is not None:
            assert tuple(map(bytes, letter.frames)) == truth[letter.order].frames, "another dead group"
        if core.lives(entry.order):
            store.remove(entry.order)


def _reopen(layout: RunLayout, run: Run, truth: dict[int, Written] | None) -> None:
    """Recover and be killed, recover and end in order, recover and hand out what there is."""
    killed = _recovered(layout, run, truth)
    with _life(layout, run, 10, truth) as first:
        _require_same_state(killed, first.events, in_order=True)
        was = first.state(run)
    with _life(layout, run, 11, truth) as second:
        assert not second.problems, f"problems after a whole start: {second.problems}"
        _require_same_state(was, second.state(run), in_order=truth is not None)
        if truth is not None:
            _pull(second.bench(run), truth)


def _require_same_state(was: Sequence[Event], now: Sequence[Event], *, in_order: bool) -> None:
    """Compare two states as they are written: a number that is none equals itself there."""
    if not in_order:
        was, now = list(map(_without_table, was)), list(map(_without_table, now))
    before, after = (list(map(msgspec.msgpack.encode, state)) for state in (was, now))
    lost = [one for one, packed in zip(was, before, strict=True) if packed not in after]
    new = [one for one, packed in zip(now, after, strict=True) if packed not in before]
    same = before == after if in_order else not (lost or new)
    assert same, f"another state: {lost} became {new}"


def _without_table(item: Event) -> Event:
    """Return a group without its table, which a later life may find again in the records."""
    return msgspec.structs.replace(item, table="") if isinstance(item, GroupSnapshot) else item


def _recovered(layout: RunLayout, run: Run, truth: dict[int, Written] | None) -> list[AnyEvent]:
    """Recover and be killed; each group without forgery is one that was written."""
    with usable(layout.root):
        require_own_records(layout)
        journal = Journal(layout.journal, run.config.broker, BodyMemory(1 << 30), lambda: None)
        try:
            found = journal.recover()
            events = list(found.events)
            for accepted in acceptances(events) if truth is not None else ():
                assert truth is not None
                written = truth[accepted.order]
                assert accepted.header == written.header, f"group {accepted.order} is another one"
                body = found.body(accepted)
                if body.load():
                    _require_same(written, tuple(map(bytes, body.frames)))
            return events
        finally:
            journal.close()


def _require_same(written: Written, frames: tuple[bytes, ...]) -> None:
    assert frames == written.frames, f"group {written.header.group_id} has other bytes"


def _pull(bench: Bench, truth: dict[int, Written]) -> None:
    """Hand out groups: each has the bytes that were written."""
    written = {one.header.group_id: one for one in truth.values()}
    route = (b"c",)
    version = PolicyVersion(0, 1000)
    bench.send(RegisterConsumer(consumer=CONSUMER, resume=version), route)
    for number in range(PULLS):
        pull = Pull(consumer=CONSUMER, step=number, version=version, sequences=8, request_id=f"r{number}")
        for reply in bench.send(pull, route):
            if isinstance(reply.message, Batch):
                _require_batch(reply, reply.message, written)
                bench.settle(reply.message, consumer=CONSUMER, no_signal=True, version=version)


def _require_batch(reply: Reply, batch: Batch, written: dict[str, Written]) -> None:
    frames: list[Any] = list(reply.frames)
    for delivery in batch.groups:
        one = written[delivery.header.group_id]
        _require_same(one, tuple(map(bytes, frames[: delivery.header.frames])))
        del frames[: delivery.header.frames]
    assert not frames


def _trimmed(root: Path, run: Run, truth: dict[int, Written] | None) -> None:
    """A trimmed journal recovers like the one before."""
    plain, cut = (copied(root, root.with_name(name)) for name in ("plain", "cut"))
    try:
        expected = _recovered(RunLayout(plain), run, truth)
        with usable(cut):
            trim(RunLayout(cut).journal)
        _require_same_state(expected, _recovered(RunLayout(cut), run, truth), in_order=True)
    finally:
        shutil.rmtree(plain)
        shutil.rmtree(cut)


def _remember(layout: RunLayout, run: Run, truth: dict[int, Written] | None) -> None:
    """Restore from `saved.rmq`, end in order, and restore again."""
    states: list[list[Event]] = []
    for epoch in (10, 11):
        with usable(layout.root):
            require_own_records(layout)
            core = BrokerCore(run.config, epoch=epoch)
            found = memory_snapshot.load(layout.saved)
            problems = core.restore(found.events, found, NOW, WALL)
            memory_snapshot.retire(layout.saved, found)
            assert not (states and problems), f"problems after a whole end: {problems}"
            for accepted in acceptances(found.events) if truth is not None else ():
                assert truth is not None
                body = found.body(accepted)
                if body.load():
                    _require_same(truth[accepted.order], tuple(map(bytes, body.frames)))
            states.append(lasting(Life(core, [], problems).bench(run)))
            memory_snapshot.save(layout.saved, core.snapshot())
    _require_same_state(*states, in_order=truth is not None)
