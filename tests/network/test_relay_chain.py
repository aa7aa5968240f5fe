"""Weights from the trainer's host over a relay to a third host, each with a network and memory of its own."""

import re
from typing import Final

import pytest
from tests.network.support.hosts import Host, Lab, Program
from tests.network.support.site import ADDRESS, RUN, Site, config

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.trainer import WeightsConfig
from rolloutmq.schemas.network.keys import Role

WEIGHTS: Final = "tests.network.support.weights"
SERVES: Final = "tcp://0.0.0.0:7764"


class Chain:
    """A run on the host `head`, a relay on `near`, and a relay behind that one on `far`."""

    def __init__(self, lab: Lab) -> None:
        self.head, self.near, self.far = (
            lab.host(name, n) for n, name in enumerate(("broker", "near", "far"), 1)
        )
        self.site = Site(lab, self.head, [self.near, self.far])
        streamed = WeightsConfig(backend="stream", listen=SERVES, insecure=True)
        write_json(self.site.layout.config, config().model_copy(update={"weights": streamed}))
        self.site.kill_broker()
        self.trainer = self.head.python("weights", WEIGHTS, RUN, answers=True)
        assert self.trainer.process.stdout is not None
        assert self.trainer.process.stdout.readline() == b"shared\n", self.trainer.text()
        self.head.start("relay", "rolloutmq", "relay", "--run-dir", RUN)
        self.first = self.join(self.near, "--listen", SERVES, "--name", "near")
        self.last = self.join(self.far, "--behind", "relay.near", "--name", "far")

    def join(self, host: Host, *words: str) -> Program:
        key = self.site.key(host, f"engine-{host.name}", Role.ENGINE)
        return host.start("relay", "rolloutmq", "relay", "--connect", ADDRESS, "--key", key, *words)

    def step(self) -> None:
        """Let the trainer write the next version."""
        assert self.trainer.process.stdin is not None
        self.trainer.process.stdin.write(b"\n")
        self.trainer.process.stdin.flush()

    def reaches(self, step: int) -> None:
        """Wait until the status tells that the last relay has a version."""
        wanted = rf"relay\.far on \S+, key engine-far: version 0\.{step}\b"
        self.last.expect(lambda: re.search(wanted, self.site.status()), f"version {step} on the last host")


@pytest.mark.extended
def test_a_third_host_gets_the_weights_from_the_second(lab: Lab) -> None:
    chain = Chain(lab)
    chain.step()
    chain.reaches(1)
    assert "serves tcp://10.77." in chain.site.status(), (
        "the address by which the second host reaches the first"
    )
    chain.first.kill()
    chain.step()
    chain.last.expect(lambda: "waits: " in chain.site.status(), "what the last relay waits for")
    chain.first = chain.join(chain.near, "--listen", SERVES, "--name", "near")
    chain.reaches(2)
    chain.site.keys.revoke("engine-far")
    chain.step()
    chain.last.expect(lambda: "revoked or unknown" in chain.last.text(), "the refusal of the revoked key")
    for program in (chain.first, chain.last):
        assert program.end() == 0, program.text()
