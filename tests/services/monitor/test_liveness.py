"""A run that was killed is told from one that ended, and from one that lives."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of
from rolloutmq.services.process.identity import identify


@pytest.fixture
def launcher() -> ProcessIdentity:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = identify("up", Role.LAUNCHER, child.pid, "t")
        child.send_signal(signal.SIGKILL)
        child.wait()
    return identity


def me(role: Role) -> ProcessIdentity:
    return identify(role.value, role, os.getpid(), "t")


def endpoints(pid: int) -> Endpoints:
    return Endpoints(ingest="", serve="", events="", publish="", pid=pid, epoch=1)


def test_nothing_was_ever_there(layout: RunLayout) -> None:
    fate = fate_of(layout)
    assert fate.life is RunLiveness.ABSENT
    assert fate.say(layout) == f"no broker runs in {layout.root}"


def test_a_run_lives_with_its_launcher(layout: RunLayout) -> None:
    write_json(layout.owner, me(Role.LAUNCHER))
    layout.summary.write_text("{}")  # of an earlier life
    fate = fate_of(layout)
    assert fate.life is RunLiveness.LIVING
    assert "starts or ends" in fate.say(layout)
    write_json(layout.endpoints, endpoints(os.getpid()))
    assert fate.say(layout).endswith("is active")


def test_a_broker_that_was_started_by_hand_is_life_too(layout: RunLayout, launcher: ProcessIdentity) -> None:
    write_json(layout.endpoints, endpoints(os.getpid()))
    assert fate_of(layout).life is RunLiveness.LIVING
    write_json(layout.endpoints, endpoints(launcher.pid))
    assert fate_of(layout).life is RunLiveness.ABSENT


def test_a_run_that_was_put_away_has_ended(layout: RunLayout) -> None:
    layout.summary.write_text('{"ended": "the trainer is done"}')
    fate = fate_of(layout)
    assert fate.life is RunLiveness.ENDED
    assert fate.say(layout).endswith("has ended: the trainer is done")


def test_a_launcher_that_was_killed_leaves_a_dead_run(layout: RunLayout, launcher: ProcessIdentity) -> None:
    write_json(layout.owner, launcher)
    fate = fate_of(layout)
    assert (fate.life, fate.launcher, fate.left, fate.broker) == (RunLiveness.DEAD, launcher.pid, 0, False)
    assert fate.say(layout) == (
        f"the run in {layout.root} is dead: its launcher, process {launcher.pid}, was killed; "
        f"clean up with `rolloutmq down {layout.root}`"
    )
    write_json(layout.processes, [me(Role.BROKER), launcher])
    write_json(layout.workers, [me(Role.WORKER)])
    fate = fate_of(layout)
    assert (fate.left, fate.broker) == (2, True)
    assert "2 of its processes still run" in fate.say(layout)


def test_another_boot_or_machine_cannot_be_judged(layout: RunLayout, launcher: ProcessIdentity) -> None:
    write_json(layout.owner, msgspec.structs.replace(launcher, boot_id="another"))
    fate = fate_of(layout)
    assert (fate.life, fate.elsewhere, fate.broker) == (RunLiveness.DEAD, True, False)
    assert "of another boot or machine" in fate.say(layout)
    write_json(layout.endpoints, endpoints(1))
    assert fate_of(layout).broker


def test_files_of_another_version_are_no_obstacle(layout: RunLayout) -> None:
    for file in (layout.owner, layout.processes, layout.workers, layout.endpoints, layout.summary):
        file.write_text("[1]")
    assert fate_of(layout).life is RunLiveness.ABSENT


def test_a_broker_that_was_started_by_hand_has_ended_once_its_address_is_gone(
    layout: RunLayout, launcher: ProcessIdentity
) -> None:
    layout.journal.mkdir()
    fate = fate_of(layout)
    assert (fate.life, fate.by_hand) == (RunLiveness.ENDED, True)
    assert fate.say(layout).endswith("has ended: its broker, which was started by hand, has ended")
    write_json(layout.endpoints, endpoints(launcher.pid))
    assert fate_of(layout).life is RunLiveness.ABSENT, "it was killed, and its address stayed"


def test_an_ack_log_shows_a_broker_once_it_has_an_ack(layout: RunLayout) -> None:
    """A producer opens it before any broker has answered."""
    log = layout.ack_log("e-0")
    log.parent.mkdir()
    log.touch()
    assert fate_of(layout).life is RunLiveness.ABSENT
    log.write_text("{}\n")
    assert fate_of(layout).by_hand


@pytest.mark.parametrize("recorded", ['{"ended": "not yet"}', '{"ended": ""}'])
def test_a_summary_of_an_active_run_is_no_reason_of_its_end(layout: RunLayout, recorded: str) -> None:
    layout.summary.write_text(recorded)
    assert fate_of(layout).life is RunLiveness.ABSENT
    layout.log("up").parent.mkdir()
    layout.log("up").touch()
    assert fate_of(layout).reason == f"see {layout.log('up')}"


def test_each_fate_tells_why_the_run_ended(layout: RunLayout, launcher: ProcessIdentity) -> None:
    assert fate_of(layout).told == "no broker runs"
    layout.summary.write_text('{"ended": "the trainer is done"}')
    assert fate_of(layout).told == "the trainer is done"
    write_json(layout.owner, launcher)
    assert fate_of(layout).told == "its launcher was killed"
    write_json(layout.owner, msgspec.structs.replace(launcher, boot_id="another"))
    assert fate_of(layout).told == "its launcher was of another boot or machine"
    write_json(layout.owner, me(Role.LAUNCHER))
    assert fate_of(layout).told == "not yet"
