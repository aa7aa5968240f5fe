"""Hand-written texts of the protocol reference: its head, and meanings of fields without a docstring."""

from typing import Final

from rolloutmq.bus.encoding.codec import MESSAGE_LIMIT_BYTES, TABLE_LIMIT_BYTES
from rolloutmq.bus.encoding.group_layout import ALIGNMENT_BYTES
from rolloutmq.bus.transport.request_client import RESEND_S
from rolloutmq.schemas.wire import envelope, replies
from rolloutmq.services.broker.io.data_plane import EVENT_LIMIT_BYTES, REQUEST_LIMIT_BYTES
from rolloutmq.services.broker.journal.format import records
from rolloutmq.services.broker.requests.vacancies import LANES_LIMIT, VACANT_KEPT

ALIAS_MEANINGS: Final = {
    "Name": "Name of a producer, consumer, environment or run.",
    "GroupId": "Id of a group, unique in the run.",
    "TableId": "Content hash of a column table, in hexadecimal.",
    "Count": "A number of something, or a sequence number.",
    "TaskId": "Id of a task, unique in the run.",
    "GpuId": "UUID of a GPU, as NVML reports it.",
}

MEANINGS: Final = {
    "abandoned": "Rollouts without a group, in all.",
    "accepted": "Groups accepted so far.",
    "accepted_groups": "Groups accepted so far.",
    "accepted_sequences": "Sequences accepted in this life of the broker.",
    "ack": "First ack of the session.",
    "arena": "Inode of the arena.",
    "arena_bytes": "Size of an arena; 0 if the broker reads none.",
    "at": "Time of the event.",
    "batch_sequences": "Sequences of one batch.",
    "blocked_s": "Time spent waiting for credit or a submitted task, over all rollout slots.",
    "busy": "Part of the last seconds with generation, 0 to 1.",
    "checkpoint_dir": "Directory of the checkpoints.",
    "checkpoint_interval": "Steps between two checkpoints.",
    "code": "Machine-readable reason.",
    "columns": "Columns in the order of their blocks.",
    "commit_wanted": "A checkpoint soon is welcome: the broker holds much uncommitted data.",
    "configured": "Value of the configuration.",
    "consumer": "Name of the consumer.",
    "count": "Wanted number; `null` returns to autoscaling.",
    "cpu_percent": "Use since the last sample; 100 is one core.",
    "cpus": "Number of cores.",
    "current": "Present number.",
    "deadline_s": "Seconds until the deadline; 0 is none.",
    "deliveries": "Number of deliveries, this one included.",
    "depth": "0: one value a sequence; 1: ragged; 2: ragged with `k` values each.",
    "detail": "Reason, for people.",
    "disk_free_bytes": "Free disk space of the run directory.",
    "draining": "It starts nothing new.",
    "dtype": "Element type.",
    "durability": "Durability of the run.",
    "enough": "Number of finished tasks to wait for; 0 is all.",
    "env": "Name of the environment.",
    "epoch": "Life of the broker; a later life has a larger one.",
    "error": "Last error, one line.",
    "events": "Address of the socket.",
    "extra": "Further metrics of the step, by name.",
    "fd": "Number of the descriptor in that process.",
    "filtered": "Groups without a signal, or too old for the loss.",
    "generation": "Generation of the lease.",
    "gpu": "UUID of the GPU.",
    "greedy": "Sample with temperature 0.",
    "group": "Name of the consumer group; its ranks share each step.",
    "group_id": "Id of the group.",
    "groups": "Number of groups.",
    "header": "Header of the group.",
    "high": "Highest score.",
    "high_bytes": "High-water mark in bytes.",
    "high_groups": "High-water mark in groups.",
    "host": "Name of the host.",
    "id": "Id of the task.",
    "ids": "Ids of the tasks.",
    "in_hand": "Work under way: rollouts of a worker, requests of an engine.",
    "incarnation": "Life of the trainer, counted by its resumptions.",
    "info": "Description of the run.",
    "index": "Number of the task in the task space; -1 without one.",
    "ingest": "Address of the socket.",
    "ino": "Inode of the memory file.",
    "journal": "State of the journal.",
    "key": "Dotted key, as in the configuration.",
    "lanes": "One entry per environment and split.",
    "late_members": "Sequences left out of groups at a deadline.",
    "lease": "Number of the lease.",
    "leased_bytes": "Bytes of leased groups.",
    "leased_groups": "Groups in leases.",
    "ledger": "Accepted groups by state.",
    "left_s": "Seconds until the deadline; 0 is none.",
    "lengths_of": "Earlier column with the same lengths; empty if the lengths travel with this column.",
    "load_1m": "Load average of one minute.",
    "loss": "Loss of the step.",
    "low": "Lowest score.",
    "max_group_bytes": "Largest group the broker accepts.",
    "max_staleness": "Staleness bound.",
    "mean": "Mean score.",
    "memory_free_bytes": "Free GPU memory.",
    "memory_total_bytes": "Total memory.",
    "memory_used_bytes": "Used memory.",
    "min_share": "Minimum share of each batch.",
    "name": "Name.",
    "nbytes": "Size of the memory file.",
    "now": "Value in force.",
    "number": "Number of the sample; a gap is a lost sample.",
    "offsets": "Offset of each group in the arena; empty if the groups travel as frames.",
    "oldest_age_s": "Age of the oldest queued group.",
    "order": "Number of the order.",
    "payload": "msgpack of any value, as submitted.",
    "pid": "Process id.",
    "policy": "Policy version.",
    "pressure": "The newest pressure message.",
    "produced": "Groups finished, in all.",
    "producer": "Name of the producer.",
    "producers": "Registered producers.",
    "progress": "Counter; it grows with each piece of work.",
    "protocol": "Protocol version of the client.",
    "publish": "Address of the socket.",
    "pull_s": "Time from the last step to the batch.",
    "queued_bytes": "Bytes of queued groups.",
    "queued_groups": "Queued groups.",
    "queued_sequences": "Queued sequences.",
    "rank": "Rank of the consumer, from 0.",
    "ready": "Workers in state `ready`.",
    "reason": "Reason, for people.",
    "rejected_by_reason": "The same, by reason.",
    "requeued": "Groups back in their queue.",
    "retry_s": "Time after which there may be room.",
    "rewards": "Scores of the group.",
    "rollout_pressure": "Queued sequences over the sequences of one batch.",
    "rss_bytes": "Resident memory.",
    "run": "Name of the run.",
    "session": "Number of the session.",
    "shm_free_bytes": "Free space of `/dev/shm`.",
    "silent_s": "Time since its last message.",
    "size": "Sequences wanted; 0 leaves it to the environment.",
    "split": "Training or evaluation.",
    "staleness_max": "Largest staleness of a group.",
    "staleness_mean": "Mean staleness.",
    "starting": "Workers in state `starting`.",
    "starting_step": "Step at the start of the trainer.",
    "state": "State.",
    "step": "Optimizer step.",
    "step_s": "Time from the batch to the settlement.",
    "table": "msgpack of the column table.",
    "tables": "Column tables.",
    "target": "Wanted number.",
    "tasks": "The tasks.",
    "temperature_c": "Temperature in degrees Celsius.",
    "tokens": "Tokens of all sequences.",
    "total_steps": "Last step of the run.",
    "tracking_group": "Group of the experiment tracker.",
    "tracking_project": "Project of the experiment tracker.",
    "trained_groups": "Groups settled as trained.",
    "tried": "False if the task was never started: it then counts as not delivered.",
    "untaught": "Groups given up at the teacher.",
    "uptime_s": "Age of this life of the broker.",
    "url": "Base address, without `/v1`.",
    "utilisation_percent": "Use of the GPU, 0 to 100.",
    "uuid": "UUID of the GPU.",
    "values": "Dotted key to value.",
    "version": "Policy version.",
    "wait": "Reason of the wait.",
    "wait_s": "Longest time to wait for the reply.",
    "waits_for": "Party other than the broker that it waits for, and why.",
    "weight": "Share of the batches, relative to other environments.",
    "why": "Reason, for people.",
    "worker": "Name of the worker.",
    "workers": "One entry per worker.",
    "world_size": "Ranks of the consumer group.",
    "Batch.tables": "Column tables of the groups.",
    "Batch.groups": "The groups of this rank, in order.",
    "ConsumerRegistered.generation": "Generation of the consumer's registration.",
    "DeclareTables.tables": "The column tables.",
    "Envelope.version": "Protocol version.",
    "Envelope.groups": "One header per group, in the order of the frames.",
    "GpuSample.name": "Model of the GPU.",
    "GpuStanding.name": "Model of the GPU.",
    "StatusReply.run": "Name of the run.",
    "StepDone.number": "Number of the event.",
    "StepSkipped.filtered": "Groups without a signal, or too old for the loss.",
    "RewardSummary.low": "Lowest score of the group.",
    "LaneScores.groups": "Groups of the batch, filtered ones included.",
    "LaneScores.sequences": "Sequences of these groups.",
    "LaneScores.tokens": "Tokens of these sequences.",
    "Commit.version": "Version of the checkpoint.",
    "Pressure.at": "Time of publication.",
    "RewardSummary.mean": "Mean score of the group.",
    "PolicyVersion.step": "Optimizer steps taken.",
    "PolicyVersion.incarnation": "Life of the trainer; a resumed trainer starts a new one.",
    "ArenaRef.pid": "Process that has the file open.",
    "RunInfo.started": "A trainer has registered.",
    "ColumnSpec.name": "Name of the column.",
    "TaskCounts.done": "Answered tasks.",
    "TaskCounts.failed": "Tasks given up.",
    "TaskCounts.queued": "Tasks in the queue.",
    "TaskCounts.leased": "Tasks in a worker's hands.",
    "TaskCounts.expired": "Tasks past their deadline.",
    "TaskCounts.cancelled": "Cancelled tasks.",
    "LedgerCounts.queued": "In the queue.",
    "LedgerCounts.leased": "In a batch.",
    "LedgerCounts.committed": "Covered by a checkpoint.",
    "LedgerCounts.filtered": "Settled without training.",
    "LedgerCounts.expired": "Too stale before a pull.",
    "LedgerCounts.dead": "Dead letters.",
    "LedgerCounts.discarded": "Removed on request.",
    "LedgerCounts.lost_before_accept": "Finished groups of dead workers, never accepted.",
    "Split.TRAIN": "Training.",
    "Split.EVAL": "Evaluation.",
    "Dtype.BOOL": "1 byte, 0 or 1.",
    "Dtype.I8": "Signed, 1 byte.",
    "Dtype.U8": "Unsigned, 1 byte.",
    "Dtype.I16": "Signed, 2 bytes.",
    "Dtype.U16": "Unsigned, 2 bytes.",
    "Dtype.I32": "Signed, 4 bytes.",
    "Dtype.U32": "Unsigned, 4 bytes.",
    "Dtype.I64": "Signed, 8 bytes.",
    "Dtype.U64": "Unsigned, 8 bytes.",
    "Dtype.F16": "IEEE 754, 2 bytes.",
    "Dtype.BF16": "bfloat16, 2 bytes.",
    "Dtype.F32": "IEEE 754, 4 bytes.",
    "Dtype.F64": "IEEE 754, 8 bytes.",
    "Dtype.OPAQUE": "msgpack of a list with one value per sequence.",
    "ErrorCode.MALFORMED": "The bytes do not decode as this message.",
    "ErrorCode.LIMIT": "A size or a count is above its limit.",
    "ErrorCode.VERSION": "The peer has another protocol version.",
    "ErrorCode.FENCED": "A newer session of the producer exists.",
    "ErrorCode.LEASE_LOST": "The lease has ended, and its groups are queued again or settled.",
    "ErrorCode.INVALID": "A field has a value the broker cannot accept.",
    "Wait.NONE": "There is no wait.",
    "Wait.LANE_FULL": "The environment is at its own high-water mark.",
    "Wait.GLOBAL_FULL": "The broker has no room for further credit.",
    "Wait.NO_CREDIT": "Credit is with other producers.",
    "Wait.MIN_SHARE": "An environment has fewer groups than its minimum share.",
    "Wait.BATCH_EXCEEDS_CAP": "One batch needs more room than the high-water mark leaves.",
    "TaskState.QUEUED": "It waits for a worker.",
    "TaskState.LEASED": "A worker has it.",
    "TaskState.CANCELLED": "It was cancelled.",
    "Cause.MANUAL": "An operator cordoned it.",
    "Cause.HEAT": "It is close to its slowdown temperature.",
    "WorkerState.STARTING": "It imports the environment, or waits for policy or broker.",
    "WorkerState.READY": "It rolls out.",
    "WorkerState.GONE": "It has signed off.",
    "GpuState.OK": "It answers.",
    "TeacherLogprobs.NONE": "No tokens.",
}
"""Field, or `Class.member`, to its meaning. A docstring in `schemas/wire` takes precedence."""

HEAD: Final = f"""\
# Wire protocol

Version {envelope.PROTOCOL_VERSION} of the protocol between the broker and its clients. Python clients use the SDK
([errors](errors.md), [own trainer](../guides/own-trainer.md)) and need none of this page. Terms are in the
[glossary](../glossary.md).

`make reference` writes this page from the structs in `schemas/wire/`.

## Sockets

The broker binds four ZeroMQ sockets, each for the clients of its host, and for those of others if `broker.listen` is
set. Their addresses are in `RUN_DIR/endpoints.json`, and in the reply to `GetInfo`.

| socket | broker | client | carries | loss |
|---|---|---|---|---|
| `ingest` | PULL | PUSH (producers) | groups | Unacked groups are resent from the spool. |
| `serve` | ROUTER | DEALER or REQ (all clients) | one request, one reply | The client repeats the request. |
| `events` | XPUB | SUB (all clients) | published events | State is repeated; samples are numbered. |
| `publish` | XSUB | PUB (trainer, orchestrator, telemetry) | events for `events` | \
The next sample replaces a lost one. |

- Clients of the host use unix sockets in `RUN_DIR/sockets` (mode 0700), or in a directory below the system's temporary
  one if the path is too long. They need no key: access to the directory is access to the run.
- `broker.listen` is the address of `serve` by TCP; `ingest`, `events` and `publish` have the next three ports, which
  are in `InfoReply.ports`. A client keeps the host that it dialed. It speaks CURVE with the keys of `rolloutmq keys
  new`, and the broker answers by ZAP who may enter ([clusters](../clusters.md)). With `broker.insecure = true` the
  sockets have the NULL mechanism, and everybody who reaches them may use the run.
- A SUB socket matches prefixes. Topics of one receiver therefore end in `/`, and a receiver compares the whole topic.

## Messages

Control messages are msgpack maps with the tag `kind`. Nested messages carry their own `kind`. Unknown fields and
unknown kinds are refused. Fields with a default may be left out. Times are seconds since the epoch of the wall clock,
durations are seconds.

| message | frames | limit |
|---|---|---|
| groups, on `ingest` | envelope, then the frames of each group | \
{envelope.FRAMES_LIMIT} frames, envelope {envelope.ENVELOPE_LIMIT_BYTES:,} bytes, \
group {envelope.GROUP_LIMIT_BYTES >> 30} GiB or `InfoReply.max_group_bytes` |
| request, on `serve` | up to 6 correlation frames, empty frame, request | {REQUEST_LIMIT_BYTES >> 20} MiB |
| reply, on `serve` | the same correlation frames, empty frame, reply, then frames of groups | \
reply {MESSAGE_LIMIT_BYTES >> 20} MiB |
| event | topic, event | {EVENT_LIMIT_BYTES >> 10} KiB on `publish` |

Only `Batch` and `LatestExampleReply` are followed by frames of groups. A REQ socket writes and strips the empty frame
itself. A DEALER client sends a correlation frame of its own, in the SDK an unsigned 64-bit counter, and matches
replies by it.

The broker checks sizes before it decodes. It answers a malformed request with `ErrorReply`. A malformed group or event
is dropped and counted in `StatusReply.rejected_by_reason`.

## Frames of a group

A message on `ingest` is `[envelope, body, big block, ..., body, big block, ...]`. The envelope is an `Envelope` as a
msgpack array. It holds one `GroupHeader` per group; all groups of a message belong to one environment and split. Each
header owns the next `frames` frames: one body, then one frame for each block above
{envelope.BIG_BLOCK_BYTES >> 20} MiB. The broker decodes the envelope only.

A group has columns. `tokens`, `mask` and `scores` are required; [a group's life](../concepts/groups.md) describes the
contents. A `ColumnTable` names the columns of a body in their order. A producer declares each table once per session
(`DeclareTables`), and headers name it by its id: BLAKE2b with a digest of 8 bytes over the msgpack of the table, in
hexadecimal. A table has at most {envelope.COLUMNS_LIMIT} columns and {TABLE_LIMIT_BYTES >> 10} KiB.

A column is stored as blocks. First come its lengths, one u32 array for each level of `depth`, unless `lengths_of`
names an earlier column with the same lengths. Then come its values, flat. The body is little-endian:

| part | content |
|---|---|
| directory | one row of three u64 per block: frame (0 is the body), offset in that frame, length in bytes |
| blocks | at offsets that are multiples of {ALIGNMENT_BYTES}; the gaps are zeros |

`crc` is CRC-32C over all frames of the group in their order. The broker stores it, and the consumer checks it.

### Groups in shared memory

A producer on the broker's host may offer an arena: a memory file of `InfoReply.arena_bytes` bytes, sealed against
resizing. `RegisterProducer.arena` names its process, descriptor, inode and size. The broker opens the file through
`/proc`, and `Ack.arena` reports success.

- A message with `offsets` carries the envelope only. Each group lies in the arena at its offset, in one piece, with
  `frames` = 1. `Envelope.arena` is the inode of the arena.
- A slot is free again once `Ack.released` covers the number of its group.
- Groups without room in the arena travel as frames. Both forms may alternate within a session.
- In a reply, `Delivery.place` names an arena of `Batch.arenas` and an offset, if the pull had `arenas` set. The bytes
  stay there until the lease ends. The consumer checks `crc`; if it differs, the lease has ended or the memory was
  reused, and the consumer pulls again without `arenas`.

## Session of a producer

1. `GetInfo` returns the addresses, the run and the largest group.
2. `RegisterProducer` opens a session. The reply holds the session number and the first ack, with its credit. Subscribe
   to `ack.PRODUCER/` before.
3. `DeclareTables` makes the column tables known.
4. Send groups on `ingest`, numbered from 1 by `seq`. `position` is the sum of `nbytes` over all groups of the session
   up to and including this one. The broker refuses a group beyond `Ack.byte_limit`, or more than
   {replies.GAP_WINDOW:,} numbers above `Ack.cumulative`. Start at most `Ack.start_limit` rollouts.
5. Acks arrive as events. They are absolute: a later ack replaces all earlier ones. Keep each group until
   `cumulative` or a bit of `gaps` covers its number.
6. If an ack is overdue, send `Sync` and resend the groups missing in its reply. A group with an accepted number is
   ignored. `Sync` also keeps an idle session alive: the broker takes back the credit of a session after
   `broker.silence_s` without a message.
7. `Goodbye` closes the session.

**Fencing.** One session of a producer is current. A newer registration fences the older session: its requests get
the error `fenced`, and its groups are dropped and counted. Session numbers are never reused, also across restarts of
the broker. `resume_session` reopens one of the last four sessions of the producer, so that a saved spool keeps its
numbers and accepted groups are not accepted twice.

**Environments.** Up to {LANES_LIMIT:,} environments and splits may hold groups or have live producers; a further one is
refused with `limit`. One without groups and producers is vacant. The broker remembers the last {VACANT_KEPT} vacant
ones, with their counts and sessions, and forgets earlier ones after `broker.silence_s`. A producer of a forgotten one
gets `unknown`: it registers again, opens a new session, and numbers its unacked groups anew. Environments of the
configuration stay.

**Broker restart.** A new `Ack.epoch` means a new life of the broker. At durability `disk` and `os` it knows the
session, and the producer continues after a `Sync`. Otherwise requests get the error `unknown`; register again and send
unacked groups with new numbers.

## Leases of a consumer

A pull leases one optimizer step to all ranks of a consumer group. [Delivery guarantees](../concepts/delivery.md)
describes batches, shards and faults.

| state | entered by | groups of the batch |
|---|---|---|
| waiting | `Pull` without a batch yet; ends with `NoBatch` after `wait_s` | queued |
| pulled | `Batch`: the rank has its shard; repeating the pull returns it again | leased |
| settled | `Settle` of the last rank; repeating it returns the same reply | trained, filtered or dead |
| committed | `Commit` with a version at or after the step | committed; no longer delivered |
| expired | a rank is silent for `broker.silence_s`, makes no progress for `broker.lease_s`, registers again, \
or sends `Release` | queued again, under a new generation; \
late settlements get `lease_lost` |
| rewound | `RegisterConsumer` with `resume` before the step | \
leased again first, in the same composition and order, with `Batch.rewound` |

- Silence, missing progress and a new registration count as a failure of each group; `Release` does not. A group with
  `broker.max_deliveries` failures is dead.
- `ConsumerBeat` at least every `broker.silence_s`, with a growing `progress`, keeps the lease.
- `Batch.generation` fences earlier leases: `Settle` repeats it.

A consumer without other ranks may pull by `groups` instead: as many as are queued, at least one, in a lease that is no
step. It holds up to `window` times `groups` groups and settles any of them with `SettleGroups`. What one request
settles is one batch for commits and rewinds. A lease without a group left is over. Heartbeats and faults are as above,
for all its leases at once. Of several suspects only the one delivered last fails with them, and a group is dead only if
the consumer held no other.

## Repeated requests

Replies get lost with a connection or a broker. The SDK repeats a request every {RESEND_S:g} s until a reply arrives.
The broker may receive any request twice. The column "repeated" of the tables below states the effect.
Replies to requests with an effect are sent once the effect has the durability of the run.

## Other languages

`examples/clients/wire_client.py` is a producer and a trainer in some 60 lines of Python without this package: ZeroMQ,
msgpack and CRC-32C. It pushes a group, pulls it as a batch, and settles it. A client for long runs also needs acks
(`ack.PRODUCER/` on `events`, and `Sync`), `ConsumerBeat` while it computes, and repeated requests.

## Versions

- `PROTOCOL_VERSION` is {envelope.PROTOCOL_VERSION}. `RegisterProducer` and `RegisterConsumer` carry it as `protocol`.
  The broker refuses another version with the error `version`, and does not depend on decoding the rest of the message.
  An `Envelope` of another version is dropped and counted.
- There is no negotiation. Both sides must have the same version, since unknown fields are refused.
- Files of a run directory have a record version of their own, {records.VERSION}. Broker and tools refuse other versions
  and change nothing; the broker exits with [code 3](exit-codes.md)."""
