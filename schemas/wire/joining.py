"""Messages by which other hosts take part in a run: configuration, engines, model's files, weights, and their status.

A host that joins has no file of the run. It asks for the run again and again, and keeps a directory of its own fresh by
the replies. Nothing here names a path of either side: a file is known by one of the names in `SHARED_FILES`.
"""

from typing import Annotated, Final

from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count, Message, Name, PolicyVersion, RunId, Seconds

SHARED_FILES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
"""Files of a model that another host may have: its configuration and its tokenizer, never its weights."""
FILE_LIMIT_BYTES: Final = 64 << 20
"""Largest shared file. Tokenizers of large vocabularies take a third of it."""
PART_BYTES: Final = 256 << 10
"""Largest part of a file in one reply."""
CONFIG_LIMIT_BYTES: Final = 1 << 20
"""Largest configuration of a run."""
ENGINES_LIMIT: Final = 1024
"""Most engines that a reply tells, and most engines of other hosts."""
URL_CHARS: Final = 512
NETWORK_CHARS: Final = 64
KEYS_SHOWN: Final = 256
"""Most keys, engines, relays and workers of one status, each."""
HOSTS_SHOWN: Final = 8
"""Most hosts of one key."""
PROBLEM_CHARS: Final = 400
WAIT_CHARS: Final = 200
TOKENS_LIMIT: Final = 10_001
"""Most hashes of tokens: one of each key, and one of the run."""


class EngineState(Message, tag="engine_state", frozen=True, kw_only=True):
    """An engine as its address file describes it.

    Attributes:
        name: Name of the engine.
        url: Base address, without `/v1`. The host 0.0.0.0 or [::] stands for the one by which the asker reached the
            broker.
        pid: Process on its host.
        number: Grows by one with each heartbeat.
        at: Time of the heartbeat by the clock of its host.
        in_hand: Unanswered requests.
        busy: Part of the last seconds with generation, 0 to 1.
        draining: It accepts no new requests.
        trouble: Reason why it cannot sample now; empty if it can.
        network: Network of its host. A URL on loopback is for processes of the same network alone.
        run_id: Id of the run whose weights it serves; empty if its directory had none.
        version: Version of the weights that it samples with; None if it does not tell.
    """

    name: Name
    url: Annotated[str, Meta(max_length=URL_CHARS)]
    pid: Count = 0
    number: Count = 0
    at: Seconds = 0.0
    in_hand: Count = 0
    busy: float = 0.0
    draining: bool = False
    trouble: Annotated[str, Meta(max_length=200)] = ""
    network: Annotated[str, Meta(max_length=NETWORK_CHARS)] = ""
    run_id: RunId = ""
    version: PolicyVersion | None = None


class SharedFile(Message, tag="shared_file", frozen=True, kw_only=True):
    """A file of the model.

    Attributes:
        name: One of the names that are shared.
        nbytes: Its size.
        mark: Another one once the file has changed.
    """

    name: Annotated[str, Meta(max_length=64)]
    nbytes: Annotated[int, Meta(ge=0, le=FILE_LIMIT_BYTES)]
    mark: Annotated[str, Meta(max_length=64)]


class HttpToken(Message, tag="http_token", frozen=True, kw_only=True):
    """Whose token for HTTP has a hash. A server of another host knows tokens by it, and cannot use them.

    Attributes:
        name: Name of the key; `(run)` for processes of the run's own host.
        role: Role of its holder, such as `worker`.
        token: SHA-256 of the token, in hexadecimal.
        revoked: When it was revoked, wall-clock seconds of the run's host; None if it was not.
    """

    name: Annotated[str, Meta(max_length=64)]
    role: Annotated[str, Meta(max_length=16)]
    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    revoked: Seconds | None = None


class GetRun(Message, tag="get_run", frozen=True, kw_only=True):
    """Ask for the run, to take part in it from another host.

    Attributes:
        have: `digest` of the configuration that the asker has; the reply leaves out the same one.
        have_tokens: `tokens_digest` of the hashes that the asker has, for the same; None for a host without a server.
    """

    have: Annotated[str, Meta(max_length=64)] = ""
    have_tokens: Annotated[str, Meta(max_length=64)] | None = None


class RunReply(Message, tag="run_reply", frozen=True, kw_only=True):
    """The run as other hosts need it.

    Attributes:
        epoch: Epoch of the broker.
        run: Name of the run.
        digest: BLAKE2b of `config`.
        config: The configuration as JSON, without secrets, paths of the run's host, and programs; empty if the asker
            has it.
        engines: The inference servers of the run, those of other hosts included.
        teacher: Base address of the teacher; empty if there is none.
        files: Files of the model that exist by now.
        tokens_digest: BLAKE2b of `tokens`; empty if the asker did not ask for them, or has another role than `engine`.
        tokens: Hashes of the tokens that a server of the asker accepts; none if the asker has them.
        run_id: Id of the run. With another one than before, what the asker has of the run is of an earlier one.
        over: The run ends, and needs no engine or relay any more.
    """

    epoch: Count
    run: Name
    digest: Annotated[str, Meta(max_length=64)]
    config: Annotated[bytes, Meta(max_length=CONFIG_LIMIT_BYTES)] = b""
    engines: Annotated[tuple[EngineState, ...], Meta(max_length=ENGINES_LIMIT)] = ()
    teacher: Annotated[str, Meta(max_length=URL_CHARS)] = ""
    files: Annotated[tuple[SharedFile, ...], Meta(max_length=64)] = ()
    tokens_digest: Annotated[str, Meta(max_length=64)] = ""
    tokens: Annotated[tuple[HttpToken, ...], Meta(max_length=TOKENS_LIMIT)] = ()
    run_id: RunId = ""
    over: bool = False


class GetFile(Message, tag="get_file", frozen=True, kw_only=True):
    """Ask for a part of a file of the model.

    Attributes:
        name: Name of the file.
        mark: Its mark in the last `RunReply`.
        offset: First byte of the part.
    """

    name: Annotated[str, Meta(max_length=64)]
    mark: Annotated[str, Meta(max_length=64)]
    offset: Annotated[int, Meta(ge=0, le=FILE_LIMIT_BYTES)] = 0


class FilePart(Message, tag="file_part", frozen=True, kw_only=True):
    """A part of a file.

    Attributes:
        offset: First byte of the part.
        data: Its bytes; none behind the end of the file.
        checksum: Their CRC32C.
    """

    offset: Count
    data: Annotated[bytes, Meta(max_length=PART_BYTES)]
    checksum: Count


class EngineBeat(Message, tag="engine_beat", frozen=True, kw_only=True):
    """Heartbeat of an engine of another host, once a second. The broker writes its address file for the run.

    Attributes:
        engine: The engine. Its name is `inference.NAME`, which no engine of the run's own host has.
        host: Name of its host, for people.
        ends: It ends in order: its address is removed.
    """

    engine: EngineState
    host: Annotated[str, Meta(max_length=255)] = ""
    ends: bool = False


class RelayBeat(Message, tag="relay_beat", frozen=True, kw_only=True):
    """Heartbeat of a relay of another host, once a second.

    Attributes:
        name: Its name, `relay.NAME`.
        host: Name of its host, for people.
        at: Wall clock of its host, by which its tickets are valid.
        version: Version of the weights that it has; None before the first.
        waits_for: What it waits for; empty if it has all.
        serves: Address for further relays, `tcp://HOST:PORT`; empty if it serves none.
        secret: Secret of the tickets for that address.
        sealed: Its transfers are encrypted.
        ends: It ends in order.
        run_id: Id of the run whose weights it has.
        behind: Relay that it gets them from; empty for that of the run.
        network: Network of its host: that of another host has another one, even where the names of the hosts are equal.
    """

    name: Name
    host: Annotated[str, Meta(max_length=255)] = ""
    at: Seconds = 0.0
    version: PolicyVersion | None = None
    waits_for: Annotated[str, Meta(max_length=WAIT_CHARS)] = ""
    serves: Annotated[str, Meta(max_length=URL_CHARS)] = ""
    secret: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    sealed: bool = True
    ends: bool = False
    run_id: RunId = ""
    behind: Annotated[str, Meta(max_length=64)] = ""
    network: Annotated[str, Meta(max_length=NETWORK_CHARS)] = ""


class GetWeightsTicket(Message, tag="get_weights_ticket", frozen=True, kw_only=True):
    """Ask for the weights, with the backend `stream`. The asker then shows the ticket to a relay.

    Attributes:
        relay: A relay of another host that serves them, `relay.NAME`; empty for that of the run.
    """

    relay: Annotated[str, Meta(max_length=64)] = ""


class WeightsTicket(Message, tag="weights_ticket", frozen=True, kw_only=True):
    """Proof that the asker may have the weights, for one connection or more in the next two minutes.

    Attributes:
        port: Port of the relay.
        host: Its host; empty for the one by which the asker reached the broker.
        shown: What the asker shows to the relay.
        key: Secret that it proves to have.
        sealed: The transfer is encrypted; the asker refuses one that is not.
    """

    port: Annotated[int, Meta(ge=1, le=65535)]
    shown: Annotated[bytes, Meta(max_length=512)]
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    sealed: bool
    host: Annotated[str, Meta(max_length=255)] = ""


class KeyUse(Message, tag="key_use", frozen=True, kw_only=True):
    """Use of one key since the start of the broker.

    Attributes:
        name: Name of the key.
        role: Its role; empty once it may not enter any more.
        hosts: Addresses from which it has entered, at most `HOSTS_SHOWN`.
        silent_s: Time since its last message. Subscriptions and heartbeats of a connection are none.
        refused: Its refused messages, by what they asked for.
    """

    name: Name
    role: str
    hosts: tuple[str, ...] = ()
    silent_s: Seconds = 0.0
    refused: dict[str, int] = {}


class JoinedEngine(Message, tag="joined_engine", frozen=True, kw_only=True):
    """An engine of another host.

    Attributes:
        name: Its name, `inference.NAME`.
        host: Its host.
        key: Key of its heartbeats; empty without one.
        silent_s: Time since the last one.
        version: Version of the weights that it samples with; None if it does not tell.
        unchanged_s: Time in which it has been behind the newest version and told no other one; 0 if it is not behind.
    """

    name: Name
    host: str
    key: str = ""
    silent_s: Seconds = 0.0
    version: PolicyVersion | None = None
    unchanged_s: Seconds = 0.0


class JoinedRelay(Message, tag="joined_relay", frozen=True, kw_only=True):
    """A relay of another host, which keeps the weights there fresh.

    Attributes:
        name: Its name, `relay.NAME`.
        host: Its host.
        key: Key of its heartbeats; empty without one.
        silent_s: Time since the last one.
        version: Version of the weights there; None before the first.
        waits_for: What it waits for; empty if it has all.
        serves: Address at which further relays get the weights; empty if it serves none.
    """

    name: Name
    host: str
    key: str = ""
    silent_s: Seconds = 0.0
    version: PolicyVersion | None = None
    waits_for: Annotated[str, Meta(max_length=WAIT_CHARS)] = ""
    serves: str = ""


class NetworkStatus(Message, tag="network_status", frozen=True, kw_only=True):
    """Other hosts of a run, published on `telemetry.network.RUN`.

    Attributes:
        listen: Address of the listener.
        insecure: It asks for no key.
        version: Newest version of the policy.
        known_keys: Number of keys that may enter.
        keys_problem: Why the list of keys cannot be read, while the one before counts; empty if it can.
        keys: Keys in use, those that were heard last first.
        engines: Engines of other hosts.
        relays: Relays of other hosts.
        workers: Key of each worker that joined.
    """

    listen: str
    insecure: bool = False
    version: PolicyVersion = PolicyVersion()
    known_keys: Count = 0
    keys_problem: Annotated[str, Meta(max_length=PROBLEM_CHARS)] = ""
    keys: tuple[KeyUse, ...] = ()
    engines: tuple[JoinedEngine, ...] = ()
    relays: tuple[JoinedRelay, ...] = ()
    workers: dict[str, str] = {}


JoiningRequest = GetRun | GetFile | EngineBeat | RelayBeat | GetWeightsTicket
JoiningReply = RunReply | FilePart | WeightsTicket
