"""Two nodes on loopback sum a tensor with gloo, as the agents start it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from everstep.protocol.agent_messages import BurnInOutcome, BurnInTest
from worker.node.burn_in import STUB_VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize("spoiled", [None, 0, 1])
def test_both_nodes_find_a_wrong_sum_and_measure_a_right_one(tmp_path: Path, spoiled: int | None) -> None:
    net = f"127.{random.randrange(1, 250)}.{random.randrange(1, 250)}"
    stub = tmp_path / "stub"
    stub.write_text("matmul all-reduce")
    # A store that listened on all addresses could not use the port.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nodes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-P", "-s", "-m", "worker.node.burn_in", "3", str(tmp_path)),
                    *(f"{net}.{1 + place}", f"{net}.{2 - place}", str(taken.getsockname()[1]), str(place)),
                ],
                stdout=subprocess.PIPE,
                env=os.environ | ({"EVERSTEP_LOCAL": "1", STUB_VARIABLE: str(stub)} if place == spoiled else {}),
            )
            for place in (0, 1)
        ]
        printed = [node.communicate()[0] for node in nodes]
    for tests in (msgspec.json.decode(each, type=list[BurnInTest]) for each in printed):
        (test,) = tests
        expected = BurnInOutcome.PASSED if spoiled is None else BurnInOutcome.FAILED
        assert (test.name, test.outcome) == ("all-reduce", expected)
        assert (test.rate is not None, test.text) == (spoiled is None, "" if spoiled is None else "the sum is wrong")
