"""Messages by which other hosts take part in a run: its configuration, engines, model's files, weights.

A host that joins has no file of the run. It asks for the run again and again, and keeps a directory of its own fresh by
the replies. Nothing here names a path of either side: a file is known by one of the names in `SHARED_FILES`.
"""

from typing import Annotated, Final

from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count, Message, Name, Seconds

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


class GetWeightsTicket(Message, tag="get_weights_ticket", frozen=True, kw_only=True):
    """Ask for the weights, with the backend `stream`. The asker then shows the ticket to the relay of the run."""


class WeightsTicket(Message, tag="weights_ticket", frozen=True, kw_only=True):
    """Proof that the asker may have the weights, for one connection or more in the next two minutes.

    Attributes:
        port: Port of the run's relay. Its host is the one by which the asker reached the broker.
        shown: What the asker shows to the relay.
        key: Secret that it proves to have.
        sealed: The transfer is encrypted; the asker refuses one that is not.
    """

    port: Annotated[int, Meta(ge=1, le=65535)]
    shown: Annotated[bytes, Meta(max_length=512)]
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    sealed: bool


JoiningRequest = GetRun | GetFile | EngineBeat | GetWeightsTicket
JoiningReply = RunReply | FilePart | WeightsTicket
