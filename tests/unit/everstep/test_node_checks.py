"""`everstep doctor --node` compares a node with its instance type, and its facts come from the node's own files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.doctor import node_facts as node_facts_module
from everstep.doctor.findings import Level
from everstep.doctor.node_checks import InstanceTypeFacts, NodeFacts, judge_node
from everstep.doctor.node_facts import node_facts
from tests.instance_metadata import Service, served

P5 = InstanceTypeFacts(name="p5.48xlarge", gpus=8, network_cards=32, efa_interfaces=32)
GOOD = NodeFacts(
    instance_type=P5.name,
    described=P5,
    gpu_count=8,
    efa_count=32,
    efa_attached=32,
    has_nccl_plugin=True,
    fabric_manager="active",
    open_files=1_048_576,
    is_memory_lockable=True,
    answers_without_token=False,
    has_rdma_device=True,
)


def test_a_node_with_everything_that_its_type_has_passes() -> None:
    findings = judge_node(GOOD)
    assert {finding.level for finding in findings} == {Level.OK}
    assert [finding.check for finding in findings] == ["gpu count", "efa", "limits", "metadata"]


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"gpu_count": 7}, "gpu count", Level.WRONG, "p5.48xlarge has 8 GPUs, and NVML lists 7"),
        ({"gpu_count": 0}, "gpu count", Level.WRONG, "NVML lists 0"),
        ({"fabric_manager": "failed"}, "fabric manager", Level.WRONG, "its unit is failed"),
        ({"fabric_manager": ""}, "fabric manager", Level.WRONG, "its unit is missing"),
        ({"efa_count": 31}, "efa", Level.WRONG, "the kernel drives 31 of the 32 EFA interfaces"),
        ({"efa_count": 0, "efa_attached": 0}, "efa", Level.WRONG, "can have 32 EFA interfaces, and this machine has 0"),
        ({"efa_count": 4, "efa_attached": 4}, "efa", Level.WARNING, "32 EFA interfaces, and this machine has 4"),
        ({"efa_error": "no provider"}, "efa", Level.WRONG, "no provider"),
        ({"has_nccl_plugin": False}, "efa", Level.WRONG, "aws-ofi-nccl is not installed"),
        ({"open_files": 1024}, "limits", Level.WARNING, "1,024 files"),
        ({"is_memory_lockable": False}, "limits", Level.WRONG, "locked memory is limited"),
        (
            {"is_memory_lockable": False, "has_rdma_device": False},
            "limits",
            Level.WARNING,
            "locked memory is limited",
        ),
        ({"answers_without_token": True}, "metadata", Level.WARNING, "IMDSv1"),
    ],
)
def test_a_difference_is_found_and_names_what_to_do(
    changes: dict[str, Any], check: str, level: Level, words: str
) -> None:
    (found,) = [finding for finding in judge_node(replace(GOOD, **changes)) if finding.level is not Level.OK]
    assert (found.check, found.level) == (check, level)
    assert words in found.message
    assert found.advice


@pytest.mark.parametrize(
    "described",
    [
        None,
        InstanceTypeFacts(name="t3.large", gpus=0, network_cards=1, efa_interfaces=0),
        InstanceTypeFacts(name="g6f.xlarge", gpus=0, network_cards=1, efa_interfaces=0),
        InstanceTypeFacts(name="c6in.32xlarge", gpus=0, network_cards=2, efa_interfaces=2),
    ],
    ids=lambda described: described.name if described else "EC2 was not asked",
)
def test_a_type_without_whole_gpus_or_without_a_description_has_no_accelerators_to_check(
    described: InstanceTypeFacts | None,
) -> None:
    facts = NodeFacts(described=described, gpu_count=1, open_files=1_048_576, is_memory_lockable=True)
    assert [(found.check, found.level) for found in judge_node(facts)] == [("limits", Level.OK)]


@pytest.mark.parametrize(
    ("name", "gpus", "has_switch"),
    [("p3.16xlarge", 8, False), ("p5.4xlarge", 1, False), ("p6-b300.48xlarge", 8, True), ("g7e.48xlarge", 8, False)],
)
def test_gpus_with_a_switch_need_the_fabric_manager(name: str, gpus: int, has_switch: bool) -> None:
    kind = InstanceTypeFacts(name=name, gpus=gpus, network_cards=1, efa_interfaces=0)
    found = judge_node(NodeFacts(described=kind, gpu_count=gpus, fabric_manager="inactive"))
    assert ("fabric manager" in [each.check for each in found]) is has_switch


@pytest.fixture
def metadata() -> Iterator[Service]:
    with served() as service:
        yield service


def test_facts_come_from_the_metadata_service_and_the_kernel(
    tmp_path: Path, metadata: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata.says = {"instance-type": "p5.48xlarge", "placement/region": "eu-west-1"}
    monkeypatch.setattr(
        node_facts_module, "described_type", lambda *asked: P5 if asked == (P5.name, "eu-west-1") else None
    )
    for number, modalias in enumerate(("pci:v00001D0Fd0000EFA1sv00001D0F", "pci:v00001D0Fd0000EC20sv00001D0F")):
        (tmp_path / "pci" / f"0000:0{number}:00.0").mkdir(parents=True)
        (tmp_path / "pci" / f"0000:0{number}:00.0" / "modalias").write_text(modalias)
    drivers = tmp_path / "drivers"
    for name, driver in (("rdmap0", "efa"), ("rdmap1", "efa"), ("mlx5_0", "mlx5_core")):
        (drivers / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "infiniband" / name / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device" / "driver").symlink_to(drivers / driver)
    tool = tmp_path / "bin" / "fi_info"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "provider: efa; $*"\n')
    tool.chmod(0o755)
    (tmp_path / "amazon" / "ofi-nccl").mkdir(parents=True)
    places = {
        "devices": tmp_path / "infiniband",
        "pci": tmp_path / "pci",
        "tools": tool.parent,
        "plugins": (tmp_path / "amazon",),
        "endpoint": metadata.url,
    }
    found = node_facts(gpu_count=8, **places)
    assert (found.instance_type, found.gpu_count, found.efa_count, found.efa_error) == ("p5.48xlarge", 8, 2, "")
    assert (found.described, found.efa_attached) == (P5, 1)
    assert found.answers_without_token is False
    assert not found.has_nccl_plugin
    assert found.has_rdma_device
    (tmp_path / "amazon" / "ofi-nccl" / "libnccl-net-ofi.so").touch()
    tool.write_text("#!/bin/sh\necho provider: tcp\n")
    found = node_facts(gpu_count=8, **places)
    assert found.has_nccl_plugin
    assert found.efa_error == "libfabric offers no provider `efa`: fi_info -p efa lists none"


def test_a_silent_metadata_service_leaves_the_type_unknown(tmp_path: Path, metadata: Service) -> None:
    metadata.status = 503
    found = node_facts(gpu_count=0, devices=tmp_path, plugins=(), endpoint=metadata.url)
    assert (found.instance_type, found.described, found.answers_without_token, found.efa_count) == ("", None, False, 0)
    assert not found.has_rdma_device
