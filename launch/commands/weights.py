"""`rolloutmq doctor --weights`: prove from a third process that an active run trains and samples the same weights.

The proofs, in order:

* manifest: attach a model of its own to the shared weights;
* aliasing: compare the address of every tensor with the manifest;
* nonce: ask the trainer a question through the scratch page, answered at its next step;
* digests: read the digests of one version;
* served: let the inference server continue a prompt, and compare the log-probabilities with those of its own model
  under the version the server reports.

With weights on disk, aliasing compares the tensors with the files of their version. Weights sent to vLLM cannot be
mapped: the proof names the sender and checks that vLLM samples from the version last sent.
"""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rolloutmq.bus.rundir import load_run, read_json
from rolloutmq.launch.commands.doctor import Finding, print_findings
from rolloutmq.schemas.errors import RolloutMQError, WeightsSilentError
from rolloutmq.schemas.files import InferenceAddress, RunLayout, SentAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.http_server.access import authorization
from rolloutmq.services.http_server.run_token import http_token
from rolloutmq.services.http_server.tls import client_tls
from rolloutmq.trainer.weights import address, backends
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.share import Level, Proof, SharedWeights

ANSWER_PATIENCE_S: Final = 10.0
REQUEST_PATIENCE_S: Final = 10.0
TOKENS: Final = 4
ATTEMPTS: Final = 20
"""Tries of a comparison with the server: the weights may change between its reply and ours."""
DIFFERENCE_NATS: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Tolerance between a log-probability of a cached step and of a full forward pass, by dtype of the weights."""
PROMPT: Final = (0, 1, 2)


def report(run_dir: Path, *, as_json: bool) -> int:
    """Run the proofs on a run and print each; return 1 if one fails."""
    layout = RunLayout(run_dir)
    if (sent := address.read_sent(layout.weights)) is not None:
        return print_findings(list(_sent(layout, sent)), as_json=as_json)
    try:
        model, share = _attach(layout)
    except (RolloutMQError, OSError, ValueError) as error:
        return print_findings([_broken("manifest", error)], as_json=as_json)
    try:
        return print_findings(list(_climb(layout, model, share)), as_json=as_json)
    finally:
        share.close()


def _sent(layout: RunLayout, sent: SentAddress) -> Iterator[Finding]:
    """Check weights sent to vLLM; they can neither be mapped nor compared."""
    found = "not mapped: the weights are sent to vLLM, which checks each set against its manifest"
    yield Finding("manifest", fine=True, found=found)
    lives = address.owner_lives(layout.weights)
    arrived = (
        f"vLLM has version {_short(sent.version)}" if sent.version else "vLLM has received no weights yet"
    )
    remedy = "wait for vLLM" if lives else "restart the trainer"
    fine = lives and sent.version is not None
    yield Finding(
        "sent", fine, f"trainer {sent.sender[0]} {'lives' if lives else 'is dead'}, {arrived}", remedy
    )
    yield _stamped(layout)


def _stamped(layout: RunLayout) -> Finding:
    """Let the server continue a prompt, and compare its reported version with the one last sent."""
    server = read_json(layout.inference, InferenceAddress)
    if server is None:
        return Finding("served", fine=False, found="no inference server", remedy="start one", needed=False)
    stamped: set[PolicyVersion] = set()
    for _ in range(ATTEMPTS):
        before = address.read_sent(layout.weights)
        try:
            stamped = _versions(_continue(layout, server.url))
        except (RolloutMQError, OSError, KeyError, msgspec.DecodeError) as error:
            return _broken("served", error)
        if before and before == address.read_sent(layout.weights) and stamped == {before.version}:
            found = f"sampled from version {_short(before.version or PolicyVersion())}, the version last sent"
            return Finding("served", fine=True, found=found)
    sampled = " and ".join(sorted(map(_short, stamped)))
    found = f"never sampled from the version last sent in {ATTEMPTS} attempts, but from {sampled}"
    return Finding("served", fine=False, found=found, remedy="retry while steps are slower", needed=False)


def _versions(choice: dict[str, Any]) -> set[PolicyVersion]:
    found = (span["version"] for span in choice["weight_versions"])
    return {PolicyVersion(version["incarnation"], version["step"]) for version in found}


def _attach(layout: RunLayout) -> tuple[Any, SharedWeights]:
    config = AutoConfig.from_pretrained(layout.model, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    return model, backends.attach(model, layout.weights, tokenizer=directory_fingerprint(layout.model))


def _climb(layout: RunLayout, model: Any, share: SharedWeights) -> Iterator[Finding]:
    for level in (Level.MANIFEST, Level.ALIASING, Level.NONCE, Level.DIGESTS):
        yield _rung(share, level)
    yield _served(layout, model, share)


def _rung(share: SharedWeights, level: Level) -> Finding:
    what = level.name.lower()
    try:
        proof = share.verify(level, patience_s=ANSWER_PATIENCE_S)
    except WeightsSilentError as error:
        remedy = "a trainer waiting for a batch takes no step: retry while it trains"
        return Finding(what, fine=False, found=str(error), remedy=remedy, needed=level == Level.NONCE)
    except RolloutMQError as error:
        return _broken(what, error)
    return Finding(what, fine=True, found=_found(proof, mapped=not isinstance(share, DiskShare)))


def _found(proof: Proof, *, mapped: bool) -> str:
    match proof.level:
        case Level.MANIFEST:
            return f"{proof.tensors} tensors, {proof.nbytes / 2**20:.1f} MiB, version {_short(proof.version)}"
        case Level.ALIASING:
            if not mapped:
                return "not mapped: every tensor equals the one in the files of its version"
            return "every tensor is at the address in the manifest"
        case Level.NONCE:
            asked = proof.answered_s
            return "not needed: the files are complete" if asked is None else f"answered in {asked:.2f} s"
        case _:
            return f"{len(proof.digests)} tensors of version {_short(proof.version)}"


def _served(layout: RunLayout, model: Any, share: SharedWeights) -> Finding:
    server = read_json(layout.inference, InferenceAddress)
    if server is None:
        return Finding("served", fine=False, found="no inference server", remedy="start one", needed=False)
    for _ in range(ATTEMPTS):
        try:
            choice = _continue(layout, server.url)
            with share.reading() as version:
                if _versions(choice) == {version}:
                    return _compared(model, choice, version)
        except (RolloutMQError, OSError, KeyError, msgspec.DecodeError) as error:
            return _broken("served", error)
    found = f"the weights changed between the server's reply and ours in {ATTEMPTS} attempts"
    return Finding("served", fine=False, found=found, remedy="retry while steps are slower", needed=False)


def _continue(layout: RunLayout, url: str) -> dict[str, Any]:
    run, _ = load_run(layout.root)
    asked = {
        "prompt": [list(PROMPT)],
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        msgspec.json.encode(asked),
        {"Content-Type": "application/json"} | authorization(http_token(run)),
    )
    with urllib.request.urlopen(request, timeout=REQUEST_PATIENCE_S, context=client_tls(run)) as answer:
        choice: dict[str, Any] = msgspec.json.decode(answer.read())["choices"][0]
    return choice


@torch.no_grad()
def _compared(model: Any, choice: dict[str, Any], version: PolicyVersion) -> Finding:
    sampled = choice["token_ids"]
    tokens = torch.tensor([[*PROMPT, *sampled]])
    logprobs = model(input_ids=tokens[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
    mine = logprobs[len(PROMPT) - 1 :].gather(-1, torch.tensor(sampled)[:, None])[:, 0]
    worst = float((mine - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max())
    found = f"log-probabilities of version {_short(version)} differ by at most {worst:.1e}"
    fine = worst <= DIFFERENCE_NATS.get(model.dtype, 0.0)
    return Finding("served", fine, found, "the server samples from different weights: restart it")


def _broken(what: str, error: Exception) -> Finding:
    return Finding(what, fine=False, found=str(error), remedy="do not train on samples of this server")


def _short(version: PolicyVersion) -> str:
    return f"{version.incarnation}.{version.step}"
