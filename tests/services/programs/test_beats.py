"""Programs at a gateway on a real broker: who posts is told by the path, and their heartbeats are the gateway's."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.gateway.site import Site, listening, scored

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.endpoint import resolve
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout, Supervision, WorkerRecord
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.schemas.wire.control import Drain, GetStatus, StatusReply, WorkerState, WorkerStatus
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.gateway.group_mapping import PostedGroup
from rolloutmq.services.gateway.service import Gateway
from rolloutmq.services.process.identity import identify

QUIET_S = 1.5
REGISTRATION = {"max_token_length": 64, "desired_name": "maths", "weight": 9.0, "group_size": 2}


class Programs:
    """Processes that play programs, and the file in which the orchestrator tells them."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.identities: dict[str, ProcessIdentity] = {}

    def start(self, worker: str) -> None:
        process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
        self._processes[worker] = process
        self.identities[worker] = identify(worker, Role.WORKER, process.pid, f"t/{worker}")
        self._write()

    def end(self, worker: str) -> None:
        process = self._processes.pop(worker)
        process.kill()
        process.wait()

    def stopping(self, worker: str) -> None:
        """Tell that the orchestrator ends a worker."""
        identity = self.identities[worker]
        record = WorkerRecord(
            worker=worker, env="e", phase="stopping", since=0.0, pid=identity.pid, reason="fewer"
        )
        write_json(self._layout.supervision, Supervision(orchestrator=identity, workers=(record,)))

    def _write(self) -> None:
        write_json(self._layout.workers, list(self.identities.values()))

    def close(self) -> None:
        for worker in list(self._processes):
            self.end(worker)


@pytest.fixture
def programs(run_dir: Path) -> Iterator[Programs]:
    made = Programs(RunLayout(run_dir))
    yield made
    made.close()


@asynccontextmanager
async def gateway(layout: RunLayout, *, trained: bool = True) -> AsyncIterator[Site]:
    section = EnvironmentConfig(
        command=("x",), group_size=2, concurrency=2, drain_quiet_s=QUIET_S, weight=3.0
    )
    config = RunConfig(environment={"e": section}, gateway=GatewayConfig(enabled=True, port=0))
    write_json(layout.config, config)
    with running_broker(config, layout):
        async with listening(layout.root) as one:
            if trained:
                await one.begin()
            yield one


async def ask(layout: RunLayout, request: Any) -> Any:
    endpoints = await resolve(layout.root)
    async with BrokerClient(endpoints.serve) as client:
        return await client.request(request)


async def worker(layout: RunLayout, name: str) -> WorkerStatus | None:
    status = await ask(layout, GetStatus())
    assert isinstance(status, StatusReply)
    return next((one for one in status.pressure.workers if one.worker == name), None)


async def until(layout: RunLayout, name: str, state: WorkerState) -> WorkerStatus:
    found: WorkerStatus | None = None

    async def reached() -> bool:
        nonlocal found
        found = await worker(layout, name)
        return found is not None and found.state is state

    await eventually(reached)
    assert found is not None
    return found


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        # What is waited for is the answer of another process: there is no event.
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_program_is_a_worker_of_its_environment(run_dir: Path, programs: Programs) -> None:
    layout = RunLayout(run_dir)
    async with gateway(layout) as one:
        programs.start("e-0")
        found = await until(layout, "e-0", WorkerState.STARTING)
        assert (found.pid, found.env) == (programs.identities["e-0"].pid, "e")
        env_id = (await one.post("/w/e-0/register-env", REGISTRATION))["env_id"]
        assert (await one.standing(env_id))["self_queue_size"] == 0
        await until(layout, "e-0", WorkerState.READY)
        await one.post("/w/e-0/scored_data", scored(1, env_id=env_id))
        await one.post("/w/e-0/scored_data_list", [scored(2, env_id=env_id), scored(3, env_id=env_id)])

        async def counted() -> bool:
            return (await until(layout, "e-0", WorkerState.READY)).produced == 3

        await eventually(counted)
        (lane,) = (await ask(layout, GetStatus())).pressure.lanes
        assert (lane.env, lane.weight, lane.accepted_groups) == ("e", 3.0, 3), (
            "the weight is that of its section"
        )
        programs.end("e-0")
        assert (await until(layout, "e-0", WorkerState.GONE)).pid == programs.identities["e-0"].pid


async def test_a_program_of_a_node_is_heard_from_there(run_dir: Path, programs: Programs) -> None:
    """Its process is none of this host; until a node is found it has no pid."""
    layout = RunLayout(run_dir)
    programs.start("e-0")
    identity = msgspec.structs.replace(programs.identities["e-0"], pid=0, start_ticks=0, boot_id="", life="a")
    write_json(layout.workers, [identity])
    async with gateway(layout) as one:
        async with one.session.get("/w/e-0/info") as answer:
            assert answer.status == 404
        placed = msgspec.structs.replace(identity, pid=2**22 + 1, boot_id="of the node", host="node-7")
        write_json(layout.workers, [placed])
        found = await until(layout, "e-0", WorkerState.STARTING)
        assert (found.pid, found.host) == (placed.pid, "node-7")
        assert (await one.get("/w/e-0/info"))["batch_size"] == 4
        write_json(layout.workers, [])
        assert (await until(layout, "e-0", WorkerState.GONE)).host == "node-7"


async def test_only_workers_whose_processes_run_have_an_address(run_dir: Path, programs: Programs) -> None:
    async with gateway(RunLayout(run_dir)) as one:
        programs.start("e-0")
        programs.start("other-0")
        for path in ("/w/e-1/info", "/w/other-0/info", "/w/e-x/info", "/w/" + "9" * 4000 + "/info"):
            async with one.session.get(path) as answer:
                assert (answer.status, "no program of this run" in await answer.text()) == (404, True), path
        assert (await one.get("/w/e-0/info"))["batch_size"] == 4
        programs.end("e-0")

        async def refused() -> bool:
            async with one.session.get("/w/e-0/info") as answer:
                return answer.status == 404

        await eventually(refused)


async def test_a_program_is_not_ready_before_there_is_a_trainer(run_dir: Path, programs: Programs) -> None:
    layout = RunLayout(run_dir)
    async with gateway(layout, trained=False) as one:
        programs.start("e-0")
        answer = await one.post("/w/e-0/register-env", REGISTRATION)
        assert answer["status"] == "wait for trainer to start"
        await until(layout, "e-0", WorkerState.STARTING)
        programs.stopping("e-0")
        await until(layout, "e-0", WorkerState.GONE)


async def test_equal_groups_of_two_programs_that_never_register_are_two(
    run_dir: Path, programs: Programs
) -> None:
    layout = RunLayout(run_dir)
    async with gateway(layout) as one:
        for name in ("e-0", "e-1"):
            programs.start(name)
            await one.post(f"/w/{name}/scored_data", scored(7))
        assert await one.tags() == [7, 7]
        (lane,) = (await ask(layout, GetStatus())).pressure.lanes
        assert (lane.env, lane.producers) == ("e", 2)


async def test_a_post_of_one_program_is_never_the_repetition_of_anothers(
    run_dir: Path, programs: Programs
) -> None:
    """Programs with one seed post the same bytes; the reply to one of them may get lost."""
    environments = {"e": EnvironmentConfig(command=("x",))}
    async with Gateway.opened(RunLayout(run_dir), GatewayConfig(), environments) as one:
        for name in ("e-0", "e-1"):
            programs.start(name)
        posted = PostedGroup(b"the same", [None], [], 0)
        first, again, other = (one.signed(posted, name) for name in ("e-0", "e-0", "e-1"))
        assert first.digest == again.digest != other.digest
        assert (first.env_ids, other.env_ids) == ([0], [1]), "who names no environment has one nevertheless"


@pytest.mark.parametrize("by", ["operator", "orchestrator"])
async def test_a_draining_program_hears_nothing_until_it_has_delivered(
    run_dir: Path, programs: Programs, by: str
) -> None:
    layout = RunLayout(run_dir)
    async with gateway(layout) as one:
        programs.start("e-0")
        env_id = (await one.post("/w/e-0/register-env", REGISTRATION))["env_id"]
        assert (await one.standing(env_id))["queue_size"] == 0
        await until(layout, "e-0", WorkerState.READY)
        if by == "operator":
            await ask(layout, Drain(worker="e-0"))
        else:
            programs.stopping("e-0")
        await until(layout, "e-0", WorkerState.DRAINING)
        held = asyncio.create_task(one.standing(env_id))
        await one.post("/w/e-0/scored_data", scored(1, env_id=env_id))
        assert not held.done()
        assert (await held)["queue_size"] == 6, "enough: three batches of four sequences"
        assert (await until(layout, "e-0", WorkerState.GONE)).produced == 1
        await one.post("/w/e-0/scored_data", scored(2, env_id=env_id))  # late, and not lost
        assert await one.tags() == [1, 2]


async def test_the_next_gateway_knows_that_a_program_may_have_rollouts_in_progress(
    run_dir: Path, programs: Programs
) -> None:
    layout = RunLayout(run_dir)
    async with gateway(layout) as one:
        programs.start("e-0")
        await one.post("/w/e-0/register-env", REGISTRATION)
    programs.stopping("e-0")
    async with gateway(layout) as one:
        await until(layout, "e-0", WorkerState.DRAINING)
        await one.post("/w/e-0/scored_data", scored(1))
        await until(layout, "e-0", WorkerState.GONE)
        assert await one.tags() is None, "half a batch"


async def test_a_program_that_waits_is_not_slow(run_dir: Path, programs: Programs) -> None:
    """Enough is queued: the time of its slots counts as waiting, as the broker tells the autoscaler."""
    layout = RunLayout(run_dir)
    async with gateway(layout) as one:
        programs.start("e-0")
        env_id = (await one.post("/w/e-0/register-env", REGISTRATION))["env_id"]
        for number in range(6):
            await one.post("/w/e-0/scored_data", scored(number, env_id=env_id))
        assert (await one.standing(env_id))["queue_size"] == 6

        async def waited() -> bool:
            return bool((await ask(layout, GetStatus())).pressure.blocked_s.get("e", 0.0))

        await eventually(waited)


async def test_unreadable_files_of_the_orchestrator_change_nothing(run_dir: Path, programs: Programs) -> None:
    layout = RunLayout(run_dir)
    async with gateway(layout) as one:
        programs.start("e-0")
        await one.post("/w/e-0/scored_data", scored(1))
        layout.workers.write_bytes(b"[{")
        await one.post("/w/e-0/scored_data", scored(2))
        with pytest.raises(msgspec.MsgspecError):
            msgspec.json.decode(layout.workers.read_bytes())
        await until(layout, "e-0", WorkerState.READY)
