"""The law of supervision, with a clock of our own and no process."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.schemas.process import MISSED_FELLOW, PERMANENT_FAILURE, ProcessSpec, Restart, Role, Step
from rolloutmq.services.orchestrator.supervision.core import (
    FELLOW_S,
    JITTER,
    KILL_LADDER,
    OBSERVER_PAUSE_S,
    UNKILLABLE_S,
    Backoff,
    EarlierLife,
    EarlierStop,
    GiveUp,
    Phase,
    SignalProcess,
    StartProcess,
    SupervisorCore,
    drain_ladder,
    term_ladder,
)

BACKOFF = Backoff(first_s=1.0, max_s=8.0, crash_limit=4, stable_s=10.0)
DRAIN = drain_ladder(confirm_s=1.0, deadline_s=30.0, grace_s=5.0)


def spec(name: str = "w", **fields: Any) -> ProcessSpec:
    return ProcessSpec(name=name, role=Role.WORKER, argv=("x",), log="w.log", **fields)


@pytest.fixture
def core() -> Iterator[SupervisorCore]:
    core = SupervisorCore(BACKOFF)
    yield core
    core.validate()


def running(core: SupervisorCore, now: float = 0.0, **fields: Any) -> None:
    core.want(spec(**fields), now)
    assert core.tick(now) == [StartProcess(spec(**fields))]
    core.started("w", now)


def restart(core: SupervisorCore, **fields: Any) -> float:
    """Wait for the pause to be over, start again, and return when."""
    due = core.due()
    assert due is not None
    assert core.tick(due - 1e-6) == []
    assert core.tick(due) == [StartProcess(spec(**fields))]
    core.started("w", due)
    return due


def phase(core: SupervisorCore) -> Phase:
    return core.views()["w"].phase


def test_exit_0_is_the_end_of_the_work(core: SupervisorCore) -> None:
    running(core)
    core.exited("w", 0, "exit code 0", 1.0)
    assert phase(core) is Phase.ENDED
    assert core.due() is None


def test_with_restart_always_exit_0_is_a_crash_like_any_other(core: SupervisorCore) -> None:
    running(core, restart=Restart.ALWAYS)
    core.exited("w", 0, "exit code 0", 1.0)
    assert phase(core) is Phase.WAITING
    (again,) = core.tick(10.0)
    assert isinstance(again, StartProcess)
    core.started("w", 10.0)
    core.retire("w", term_ladder(5.0), "enough", 100.0)
    core.exited("w", 0, "exit code 0", 101.0)
    assert phase(core) is Phase.ENDED


def test_a_foreign_program_gets_no_sigusr1(core: SupervisorCore) -> None:
    running(core, foreign=True)
    core.retire("w", drain_ladder(1.0, 30.0, 5.0), "fewer", 10.0)
    steps = [
        action.step
        for now in (10.0, 11.0, 40.0, 45.0)
        for action in core.tick(now)
        if isinstance(action, SignalProcess)
    ]
    assert steps == [Step.DRAIN, Step.TERM, Step.KILL]


def test_the_pause_doubles_up_to_its_bound_with_some_chance(core: SupervisorCore) -> None:
    core = SupervisorCore(Backoff(first_s=1.0, max_s=4.0, crash_limit=9, stable_s=10.0))
    running(core)
    now = 0.0
    for longest in (1.0, 2.0, 4.0, 4.0):
        core.exited("w", 1, "exit code 1", now)
        pause = restart(core) - now
        assert longest * (1 - JITTER) <= pause <= longest
        now += pause
    assert core.views()["w"].restarts == 4


def test_the_pauses_are_those_of_the_seed() -> None:
    def pauses(seed: int) -> list[float]:
        core = SupervisorCore(BACKOFF, seed)
        running(core)
        found = []
        for _ in range(3):
            core.exited("w", 1, "exit code 1", 0.0)
            found.append(core.views()["w"].due)
            core.tick(found[-1])
            core.started("w", 0.0)
        return found

    assert pauses(1) == pauses(1)
    assert pauses(1) != pauses(2)


def test_a_crash_loop_is_fatal_with_the_reason(core: SupervisorCore) -> None:
    running(core)
    for _ in range(3):
        now = core.views()["w"].since
        core.exited("w", 1, "exit code 1: ImportError: no x", now + 9.0)
        assert phase(core) is Phase.WAITING
        restart(core)
    core.exited("w", -11, "killed by SIGSEGV", core.views()["w"].since)
    assert phase(core) is Phase.FATAL
    reason = core.views()["w"].reason
    assert reason == "crashed 4 times in a row, each within 10 s of its start; the last: killed by SIGSEGV"
    assert core.due() is None


def test_a_process_that_lived_long_enough_starts_its_count_again(core: SupervisorCore) -> None:
    running(core)
    for _ in range(12):
        core.exited("w", -9, "killed by SIGKILL", core.views()["w"].since + 10.0)
        restart(core)
    assert core.views()["w"].crashes == 0


def test_a_spare_process_may_be_killed_any_number_of_times(core: SupervisorCore) -> None:
    """Others would end with it, who lack nothing without it."""
    running(core, spare=True)
    for _ in range(20):
        core.exited("w", -9, "killed by SIGKILL", core.views()["w"].since)
        assert phase(core) is Phase.WAITING
        due = core.due()
        assert due is not None
        assert core.tick(due) == [StartProcess(spec(spare=True))]
        core.started("w", due)
    core.exited("w", 1, "exit code 1", core.views()["w"].since)
    assert phase(core) is Phase.FATAL, "its own fault counts"


def test_an_observer_may_crash_any_number_of_times_at_growing_pauses(core: SupervisorCore) -> None:
    running(core, observer=True)
    pauses = []
    for _ in range(20):
        crashed_at = core.views()["w"].since
        core.exited("w", 1, "exit code 1", crashed_at)
        core.validate()
        assert phase(core) is Phase.WAITING
        due = core.due()
        assert due is not None
        pauses.append(due - crashed_at)
        assert core.tick(due) == [StartProcess(spec(observer=True))]
        core.started("w", due)
    assert pauses[0] < pauses[2] < OBSERVER_PAUSE_S
    assert pauses[-10:] == pytest.approx([OBSERVER_PAUSE_S] * 10)


def test_an_end_that_nobody_can_explain_is_a_crash(core: SupervisorCore) -> None:
    core.adopt(spec(), 0.0)
    core.exited("w", None, "ended", 1.0)
    assert phase(core) is Phase.WAITING


def test_what_cannot_be_started_backs_off_and_is_given_up(core: SupervisorCore) -> None:
    core.want(spec(), 0.0)
    for _ in range(4):
        due = core.due()
        assert due is not None
        assert core.tick(due) == [StartProcess(spec())]
        core.start_failed("w", "cannot be started: no such file", due)
    assert phase(core) is Phase.FATAL
    assert "no such file" in core.views()["w"].reason


def test_never_means_never(core: SupervisorCore) -> None:
    running(core, restart=Restart.NEVER)
    core.exited("w", 1, "exit code 1", 1.0)
    assert phase(core) is Phase.FATAL
    assert core.views()["w"].reason == "exit code 1"


def test_a_hopeless_exit_code_is_believed_at_once(core: SupervisorCore) -> None:
    running(core)
    core.exited("w", PERMANENT_FAILURE, "exit code 3: error: it always raises", 100.0)
    assert phase(core) is Phase.FATAL
    assert core.views()["w"].reason == "exit code 3: error: it always raises"


CREW = {"crew": "c", "crew_patience_s": 60.0}


def test_whom_a_fellow_has_missed_hangs_and_is_started_again(core: SupervisorCore) -> None:
    for name in ("told", "hung", "ended", "young"):
        core.want(spec(name, **CREW), 0.0)
    core.want(spec("stranger"), 0.0)
    core.tick(0.0)
    for name in ("told", "hung", "ended", "stranger"):
        core.started(name, 0.0)
    core.started("young", 50.0)

    core.exited("told", MISSED_FELLOW, "exit code 5", 100.0)
    core.exited("ended", MISSED_FELLOW, "exit code 5", 101.0)
    at = 100.0 + FELLOW_S
    assert core.tick(at - 1e-6) == [StartProcess(spec("told", **CREW)), StartProcess(spec("ended", **CREW))]
    core.started("told", at - 1e-6)
    core.started("ended", at - 1e-6)
    assert core.due() == at
    assert core.tick(at) == [SignalProcess("hung", Step.KILL)]
    core.exited("hung", -9, "killed by SIGKILL", at + 1.0)
    hung = core.views()["hung"]
    assert (hung.phase, hung.crashes) == (Phase.WAITING, 0)
    assert hung.reason == "hangs: told gave up after waiting 60 s for it"
    assert core.tick(at + 3.0) == [StartProcess(spec("hung", **CREW))]
    core.started("hung", at + 3.0)
    assert core.due() is None


def test_another_end_of_a_fellow_makes_nobody_suspect(core: SupervisorCore) -> None:
    for name in ("crashed", "w"):
        core.want(spec(name, **CREW), 0.0)
        core.tick(0.0)
        core.started(name, 0.0)
    core.exited("crashed", 1, "exit code 1", 100.0)
    assert core.tick(1000.0) == [StartProcess(spec("crashed", **CREW))]


def test_the_ladder_goes_down_on_time(core: SupervisorCore) -> None:
    running(core)
    core.retire("w", DRAIN, "fewer are needed", 100.0)
    seen = []
    while (due := core.due()) is not None:
        seen += [(due, action) for action in core.tick(due)]
    assert seen == [
        (100.0, SignalProcess("w", Step.DRAIN)),
        (101.0, SignalProcess("w", Step.USR1)),
        (130.0, SignalProcess("w", Step.TERM)),
        (135.0, SignalProcess("w", Step.KILL)),
        (135.0 + UNKILLABLE_S, GiveUp("w", "survived SIGKILL")),
    ]
    assert phase(core) is Phase.FATAL


@pytest.mark.parametrize("code", [0, 1, -15, None])
def test_however_a_retired_process_ends_it_stays_away(core: SupervisorCore, code: int | None) -> None:
    running(core)
    core.retire("w", DRAIN, "fewer are needed", 1.0)
    core.tick(1.0)
    core.exited("w", code, "ended", 2.0)
    assert phase(core) is Phase.ENDED
    assert core.tick(1000.0) == []


def test_a_process_that_waits_for_its_restart_is_retired_at_once(core: SupervisorCore) -> None:
    running(core)
    core.exited("w", 1, "exit code 1", 1.0)
    core.retire("w", DRAIN, "the run ends", 1.1)
    assert phase(core) is Phase.ENDED
    assert core.tick(1000.0) == []


def test_a_second_ladder_brings_rungs_forward_and_never_back(core: SupervisorCore) -> None:
    running(core)
    core.retire("w", DRAIN, "fewer are needed", 0.0)
    assert core.tick(0.0) == [SignalProcess("w", Step.DRAIN)]
    core.retire("w", term_ladder(5.0), "the run ends", 0.5)
    assert core.tick(0.5) == [SignalProcess("w", Step.TERM)]
    core.retire("w", DRAIN, "again", 1.0)
    assert core.due() == 5.5
    core.retire("w", KILL_LADDER, "now", 2.0)
    assert core.tick(2.0) == [SignalProcess("w", Step.KILL)]


def test_a_failed_process_ends_and_is_not_started_again(core: SupervisorCore) -> None:
    running(core)
    core.fail("w", term_ladder(5.0), "the environment always raises", 1.0)
    assert core.tick(1.0) == [SignalProcess("w", Step.TERM)]
    core.exited("w", 0, "exit code 0", 1.5)
    assert phase(core) is Phase.FATAL
    assert core.views()["w"].reason == "the environment always raises"


def test_a_failure_that_is_heard_during_the_pause_ends_it(core: SupervisorCore) -> None:
    running(core)
    core.exited("w", 1, "exit code 1", 1.0)
    core.fail("w", term_ladder(5.0), "the environment always raises", 1.1)
    assert phase(core) is Phase.FATAL
    assert core.tick(1000.0) == []


def test_a_process_that_is_held_back_is_started_when_it_is_let_and_not_before_it_is_due(
    core: SupervisorCore,
) -> None:
    running(core)
    core.exited("w", 1, "exit code 1", 0.0)
    due = core.views()["w"].due
    core.hold("w", True)
    assert core.due() is None
    assert core.tick(due + 100.0) == []
    core.hold("w", False)
    assert core.tick(due - 1e-6) == []
    assert core.tick(due + 100.0) == [StartProcess(spec())]
    core.started("w", due + 100.0)
    core.hold("w", True)
    core.exited("w", 1, "exit code 1", due + 200.0)
    assert core.due() is not None


def test_a_name_is_free_again_when_its_process_is_over(core: SupervisorCore) -> None:
    running(core)
    with pytest.raises(ValueError, match="process w is running"):
        core.want(spec(), 1.0)
    core.exited("w", 0, "exit code 0", 1.0)
    core.want(spec(), 2.0)
    assert core.tick(2.0) == [StartProcess(spec())]


@given(
    st.lists(
        st.tuples(st.sampled_from(["tick", "exit0", "exit1", "retire", "kill", "fail"]), st.floats(0, 20))
    )
)
def test_whatever_happens_no_process_is_started_twice(events: list[tuple[str, float]]) -> None:
    core = SupervisorCore(BACKOFF)
    core.want(spec(), 0.0)
    now, lives = 0.0, False
    for event, pause in events:
        now += pause
        if event.startswith("exit") and lives:
            core.exited("w", int(event[4:]), "ended", now)
            lives = False
        elif event == "retire":
            core.retire("w", DRAIN, "asked", now)
        elif event == "kill":
            core.retire("w", KILL_LADDER, "asked", now)
        elif event == "fail":
            core.fail("w", DRAIN, "asked", now)
        for action in core.tick(now):
            if isinstance(action, StartProcess):
                assert not lives
                lives = True
                core.started("w", now)
            elif isinstance(action, GiveUp):
                lives = False
            else:
                assert lives
        core.validate()
        assert core.tick(now) == []


def until_fatal(core: SupervisorCore, now: float, life_s: float, code: int = 1, most: int = 50) -> float:
    """Let the process die `life_s` after each start until it is given up; return when."""
    for _ in range(most):
        now += life_s
        core.exited("w", code, f"exit code {code}", now)
        if phase(core) is Phase.FATAL:
            return now
        due = core.due()
        assert due is not None
        now = due
        core.tick(now)
        core.started("w", now)
    raise AssertionError("it was never given up")


def test_a_slow_crash_loop_that_is_never_ready_is_fatal(core: SupervisorCore) -> None:
    """Its process lives longer than `stable_s`, and does nothing."""
    running(core, kind="e")
    until_fatal(core, 0.0, life_s=60.0)
    assert core.views()["w"].reason == (
        "crashed 4 times in a row, each before it was ready for 10 s; the last: exit code 1"
    )


def test_a_process_that_was_ready_for_long_enough_starts_its_count_again(core: SupervisorCore) -> None:
    running(core, kind="e")
    core.exited("w", 1, "exit code 1: no", 60.0)
    core.tick(70.0)
    core.started("w", 70.0)
    core.ready("w", 100.0)
    core.ready("w", 109.0)
    view = core.views()["w"]
    assert (view.crashes, view.reason, view.ready_at) == (1, "exit code 1: no", 100.0), "not stable yet"
    core.ready("w", 110.0)
    assert (core.views()["w"].crashes, core.views()["w"].reason) == (0, "")
    core.exited("w", 1, "exit code 1: again", 120.0)
    view = core.views()["w"]
    assert (view.crashes, view.ready_at, view.was_ready) == (0, None, True)


def test_nothing_is_hopeless_of_a_kind_that_has_done_work(core: SupervisorCore) -> None:
    running(core, kind="e")
    core.prove("e")
    core.exited("w", PERMANENT_FAILURE, "exit code 3: hub away", 2.0)
    assert phase(core) is Phase.WAITING
    (again,) = core.tick(10.0)
    assert isinstance(again, StartProcess)
    core.started("w", 10.0)
    until_fatal(core, 10.0, 2.0, PERMANENT_FAILURE)
    assert core.views()["w"].reason.startswith("crashed 4 times in a row")


def test_another_kind_that_worked_proves_nothing(core: SupervisorCore) -> None:
    running(core, kind="e")
    core.prove("f")
    core.exited("w", PERMANENT_FAILURE, "exit code 3: typo", 2.0)
    assert phase(core) is Phase.FATAL


def test_a_reported_failure_of_a_proven_kind_is_a_crash(core: SupervisorCore) -> None:
    running(core, kind="e")
    core.prove("e")
    core.fail("w", term_ladder(5.0), "it raises", 5.0)
    core.fail("w", term_ladder(5.0), "it raises", 5.5)
    assert core.tick(5.5) == [SignalProcess("w", Step.TERM)]
    assert core.views()["w"].returns
    core.exited("w", PERMANENT_FAILURE, "exit code 3: error: it raises", 6.0)
    view = core.views()["w"]
    assert (view.phase, view.reason, view.crashes) == (Phase.WAITING, "exit code 3: error: it raises", 1)
    core.fail("w", term_ladder(5.0), "what was heard of the last life", 6.1)
    assert phase(core) is Phase.WAITING


def test_a_failing_process_that_is_retired_does_not_come_back(core: SupervisorCore) -> None:
    running(core, kind="e")
    core.prove("e")
    core.fail("w", term_ladder(5.0), "it raises", 5.0)
    core.retire("w", term_ladder(1.0), "the run ends", 5.5)
    core.exited("w", PERMANENT_FAILURE, "exit code 3", 6.0)
    assert phase(core) is Phase.ENDED


def test_the_crashes_of_an_adopted_process_go_on_counting(core: SupervisorCore) -> None:
    core.adopt(spec(kind="e"), 0.0, EarlierLife(was_ready=True, crashes=3))
    view = core.views()["w"]
    assert (view.was_ready, view.ready_at, view.adopted) == (True, None, True)
    core.exited("w", 1, "exit code 1", 60.0)
    assert phase(core) is Phase.FATAL


def test_an_adopted_process_that_was_ready_is_ready(core: SupervisorCore) -> None:
    core.adopt(spec(kind="e"), 0.0, EarlierLife(ready=True))
    core.exited("w", 1, "exit code 1", 60.0)
    view = core.views()["w"]
    assert (view.phase, view.crashes, view.was_ready) == (Phase.WAITING, 0, True)


def test_an_adopted_process_is_as_old_as_its_supervision(core: SupervisorCore) -> None:
    core.adopt(spec(kind="e"), 50.0, EarlierLife(ready=True, born=3.0))
    assert core.views()["w"].born == 3.0


def test_a_process_that_was_given_up_earlier_stays_so(core: SupervisorCore) -> None:
    core.keep_fatal(spec(kind="e"), 40.0, "crashed 4 times", EarlierLife(was_ready=True, crashes=4, born=3.0))
    core.validate()
    assert core.tick(1000.0) == []
    view = core.views()["w"]
    assert (view.phase, view.since, view.reason, view.crashes, view.born, view.failing) == (
        *(Phase.FATAL, 40.0, "crashed 4 times", 4, 3.0, True),
    )
    core.forget("w")
    assert core.views() == {}


TERM = term_ladder(5.0)


@pytest.mark.parametrize("code", [0, 130, 3, -15])
def test_a_process_that_hangs_is_ended_and_restarted_whatever_its_exit_code(
    core: SupervisorCore, code: int
) -> None:
    running(core)
    core.hang("w", TERM, "hangs: silent", 100.0)
    core.hang("w", TERM, "hangs: silent", 100.5)
    core.validate()
    assert core.tick(100.5) == [SignalProcess("w", Step.TERM)]
    assert core.views()["w"].reason == "hangs: silent"
    core.exited("w", code, "exit code", 101.0)
    view = core.views()["w"]
    assert (view.phase, view.reason, view.crashes) == (Phase.WAITING, "hangs: silent", 0)
    restart(core)
    assert core.tick(200.0) == [], "no rung is left"


def test_a_process_that_hangs_at_sigterm_is_killed_then_given_up(core: SupervisorCore) -> None:
    running(core)
    core.hang("w", TERM, "hangs: silent", 1.0)
    assert core.tick(1.0) == [SignalProcess("w", Step.TERM)]
    assert core.due() == 6.0
    assert core.tick(6.0) == [SignalProcess("w", Step.KILL)]
    assert core.tick(6.0 + UNKILLABLE_S) == [GiveUp("w", "survived SIGKILL")]


def test_early_hangs_count_as_early_crashes(core: SupervisorCore) -> None:
    running(core)
    now = 0.0
    for _ in range(BACKOFF.crash_limit):
        core.hang("w", KILL_LADDER, "hangs: silent", now + 1.0)
        core.tick(now + 1.0)
        core.exited("w", -9, "killed by SIGKILL", now + 2.0)
        if phase(core) is not Phase.FATAL:
            now = restart(core)
    assert core.views()["w"].reason.endswith("the last: hangs: silent")


def hung_life(core: SupervisorCore, now: float, heard_s: float, silent_s: float) -> float:
    """Let a life be ready at once and heard for some time, then silent until it is ended for that; return the end."""
    core.ready("w", now)
    core.ready("w", now + heard_s)
    for second in range(1, int(silent_s) + 1):
        core.ready("w", now + heard_s + second, second)
    now += heard_s + silent_s
    core.hang("w", KILL_LADDER, "hangs: silent", now)
    core.tick(now)
    core.ready("w", now + 0.5)
    core.exited("w", -9, "killed by SIGKILL", now + 1.0)
    return now + 1.0


def test_a_process_that_hangs_when_it_is_ready_is_given_up_however_long_it_is_watched(
    core: SupervisorCore,
) -> None:
    running(core, kind="e")
    core.prove("e")
    now = 0.0
    for crashes in range(1, BACKOFF.crash_limit):
        now = hung_life(core, now, heard_s=1.0, silent_s=10 * BACKOFF.stable_s)
        assert core.views()["w"].crashes == crashes
        now = restart(core, kind="e")
    hung_life(core, now, heard_s=1.0, silent_s=10 * BACKOFF.stable_s)
    assert core.views()["w"].reason.endswith("each before it was ready for 10 s; the last: hangs: silent")


def test_a_process_that_hangs_after_good_work_starts_its_count_again(core: SupervisorCore) -> None:
    running(core, kind="e")
    hung_life(core, 0.0, heard_s=1.0, silent_s=20.0)
    assert core.views()["w"].crashes == 1
    now = restart(core, kind="e")
    hung_life(core, now, heard_s=BACKOFF.stable_s, silent_s=20.0)
    assert core.views()["w"].crashes == 0


def test_a_late_report_of_an_earlier_heartbeat_shortens_no_uptime(core: SupervisorCore) -> None:
    running(core, kind="e")
    core.ready("w", 1.0)
    core.ready("w", 12.0)
    core.ready("w", 12.5, silent_s=8.0)
    core.hang("w", KILL_LADDER, "hangs: silent", 20.0)
    core.tick(20.0)
    core.exited("w", -9, "killed by SIGKILL", 20.0)
    assert core.views()["w"].crashes == 0


def test_silence_that_ends_was_uptime(core: SupervisorCore) -> None:
    """An environment may block the loop of its worker for a while."""
    running(core, kind="e")
    core.exited("w", 1, "exit code 1", 1.0)
    now = restart(core, kind="e")
    core.ready("w", now)
    core.ready("w", now + 30.0, 29.0)
    assert core.views()["w"].crashes == 1
    core.ready("w", now + 31.0, 0.0)
    assert core.views()["w"].crashes == 0


def test_a_draining_process_that_hangs_ends_sooner_and_for_good(core: SupervisorCore) -> None:
    running(core)
    core.retire("w", DRAIN, "scale down", 0.0)
    core.tick(1.0)
    core.hang("w", TERM, "hangs: silent", 2.0)
    assert core.tick(2.0) == [SignalProcess("w", Step.TERM)]
    core.exited("w", 130, "exit code 130", 3.0)
    assert phase(core) is Phase.ENDED


def test_a_hanging_process_that_is_retired_gets_no_longer_time(core: SupervisorCore) -> None:
    running(core)
    core.hang("w", TERM, "hangs: silent", 1.0)
    core.tick(1.0)
    core.retire("w", DRAIN, "scale down", 2.0)
    assert core.tick(6.0) == [SignalProcess("w", Step.KILL)]
    core.exited("w", -9, "killed", 6.0)
    assert phase(core) is Phase.ENDED


def stopped(core: SupervisorCore, **life: Any) -> EarlierLife:
    """Return what the next supervisor learns of a process that is being ended."""
    view = core.views()["w"]
    return EarlierLife(
        stop=EarlierStop(view.since, view.reason, view.rungs, view.failing, view.returns), **life
    )


def test_an_adopted_process_that_was_draining_drains_at_the_times_of_before(core: SupervisorCore) -> None:
    core.adopt(spec(), 0.0)
    core.retire("w", DRAIN, "too many", 100.0)
    core.tick(101.0)
    following = SupervisorCore(BACKOFF)
    following.adopt(spec(), 110.0, stopped(core))
    view = following.views()["w"]
    assert (view.phase, view.since, view.reason, view.ends) == (Phase.STOPPING, 100.0, "too many", 130.0)
    # The order of before may not have left.
    assert following.tick(110.0) == [SignalProcess("w", Step.DRAIN)]
    assert following.tick(130.0) == [SignalProcess("w", Step.TERM)]
    following.exited("w", 0, "exit code 0", 131.0)
    assert following.views()["w"].phase is Phase.ENDED
    following.validate()


def test_an_adopted_process_that_was_killed_is_killed(core: SupervisorCore) -> None:
    core.adopt(spec(), 0.0)
    core.retire("w", KILL_LADDER, "enough", 1.0)
    core.tick(1.0)
    following = SupervisorCore(BACKOFF)
    following.adopt(spec(), 2.0, stopped(core))
    assert following.tick(2.0) == [SignalProcess("w", Step.KILL)]
    assert following.tick(2.0 + UNKILLABLE_S) == [GiveUp("w", "survived SIGKILL")]


def test_an_adopted_process_that_was_ended_for_a_failure_is_given_up(core: SupervisorCore) -> None:
    core.adopt(spec(kind="e"), 0.0)
    core.fail("w", term_ladder(5.0), "it always raises", 1.0)
    core.tick(1.0)
    following = SupervisorCore(BACKOFF)
    following.adopt(spec(kind="e"), 2.0, stopped(core))
    assert following.tick(2.0) == []
    following.exited("w", 0, "exit code 0", 3.0)
    assert following.views()["w"].phase is Phase.FATAL
    assert following.views()["w"].reason == "it always raises"


def test_an_adopted_process_that_was_ended_for_a_failure_of_a_proven_kind_comes_back(
    core: SupervisorCore,
) -> None:
    core.prove("e")
    core.adopt(spec(kind="e"), 0.0)
    core.fail("w", term_ladder(5.0), "it always raises", 1.0)
    following = SupervisorCore(BACKOFF)
    following.adopt(spec(kind="e"), 2.0, stopped(core, crashes=1))
    following.exited("w", 0, "exit code 0", 3.0)
    view = following.views()["w"]
    assert (view.phase, view.crashes, view.reason) == (Phase.WAITING, 2, "it always raises")
    following.validate()
