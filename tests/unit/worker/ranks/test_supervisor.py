"""Tests how a rank's exit is classified, and the environment variables of a rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from msgspec import structs

from everstep.protocol.agent_messages import ExitClass, MemoryEnd, MemoryKind, MemorySource
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.plan import CHECK_VARIABLE
from tests.unit.worker.rank_plans import RUN, rank_plan
from worker.node.rank_user import RankUser
from worker.ranks import environment as rank_environment_module
from worker.ranks.environment import (
    RankPaths,
    inherited_as,
    is_reserved,
    node_environment,
    rank_arguments,
    rank_environment,
    with_packages,
)
from worker.ranks.files import RankFiles, last_lines
from worker.ranks.shim.messages import RankEnd
from worker.ranks.supervisor import ExitedRank, classify

AWS_KEYS = (
    *(
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SECURITY_TOKEN",
        "AWS_PROFILE",
        "AWS_DEFAULT_PROFILE",
    ),
    *(
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_ROLE_ARN",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_BEARER_TOKEN_BEDROCK",
    ),
    *(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    ),
)
PATHS = RankPaths(agent_socket=Path("/run/ranks.sock"), output_dir=Path("/state/out"))


@pytest.mark.parametrize(
    ("code", "is_stopped", "is_out_of_memory", "expected"),
    [
        (0, False, False, ExitClass.SUCCESS),
        (0, True, False, ExitClass.SUCCESS),
        (1, False, False, ExitClass.ERROR),
        (1, True, False, ExitClass.HALTED),
        (137, False, True, ExitClass.ERROR),
        (-signal.SIGKILL, False, False, ExitClass.KILLED),
        (-signal.SIGKILL, False, True, ExitClass.OUT_OF_MEMORY),
        (-signal.SIGKILL, True, True, ExitClass.HALTED),
        (-signal.SIGTERM, False, True, ExitClass.KILLED),
        (-signal.SIGSEGV, False, True, ExitClass.CRASHED),
        (-signal.SIGABRT, False, False, ExitClass.CRASHED),
        (-signal.SIGBUS, True, False, ExitClass.HALTED),
    ],
)
def test_exits_are_classified(code: int, is_stopped: bool, is_out_of_memory: bool, expected: ExitClass) -> None:
    assert classify(code, is_stopped=is_stopped, is_out_of_memory=is_out_of_memory) is expected


def test_an_exit_is_described_with_the_end_of_stderr(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    stderr.write_text("Traceback\nValueError: no\n")
    exited = ExitedRank(
        RUN, Generation(2), Rank(1), RankEnd(code=1, at_seconds=5.0, stopped=False, text="and a remark"), stderr
    )
    told = exited.describe(Step(12))
    assert (told.exit_class, told.code, told.at_seconds, told.boundary) == (ExitClass.ERROR, 1, 5.0, 12)
    assert told.last_lines == "Traceback\nValueError: no\nand a remark"


def test_an_exit_without_a_traceback_is_described_with_both_streams(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("loss 3\nnothing to do\n")
    (tmp_path / "err").write_text("\r 10%|#   |\r 20%|##  |\nwarning\n")
    end = RankEnd(code=3, at_seconds=5.0, stopped=False)
    exited = ExitedRank(RUN, Generation(2), Rank(1), end, tmp_path / "err", stdout=tmp_path / "out")
    assert exited.describe(Step(1)).last_lines == "loss 3\nnothing to do\n 20%|##  |\nwarning"
    (tmp_path / "err").write_text("Traceback (most recent call last):\nKeyError: 1\n")
    assert exited.describe(Step(1)).last_lines == "Traceback (most recent call last):\nKeyError: 1"


def test_a_stream_of_carriage_returns_does_not_hold_the_agent(tmp_path: Path) -> None:
    """With cubic time, this test would reach its time limit."""
    (tmp_path / "err").write_bytes(b"x" * 100 + b"\r" * 65_000)
    exited = ExitedRank(RUN, Generation(2), Rank(1), RankEnd(code=1, at_seconds=5.0, stopped=False), tmp_path / "err")
    assert exited.describe(Step(1)).last_lines.strip() == ""


def test_an_exception_of_lack_of_memory_is_named(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    stderr.write_text("Traceback (most recent call last):\n  File 'x'\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    raised = ExitedRank(RUN, Generation(2), Rank(1), RankEnd(code=1, at_seconds=5.0, stopped=False), stderr).describe(
        Step(12)
    )
    assert (raised.exit_class, raised.code) == (ExitClass.OUT_OF_MEMORY, 1)
    assert raised.memory == MemoryEnd(
        source=MemorySource.EXCEPTION, kind=MemoryKind.GPU, words="torch.OutOfMemoryError: CUDA out of memory."
    )
    halted = ExitedRank(RUN, Generation(2), Rank(1), RankEnd(code=1, at_seconds=5.0, stopped=True), stderr).describe(
        Step(12)
    )
    assert (halted.exit_class, halted.memory) == (ExitClass.HALTED, None)


@pytest.mark.covers("CreateTrainingJob.HyperParameters", "CreateTrainingJob.RanksPerNode")
def test_the_variables_are_those_of_torchrun_and_ours() -> None:
    plan = rank_plan(
        addresses=("127.0.0.2", "127.0.0.3"),
        ranks_per_node=2,
        generation=5,
        hyperparameters={"steps": "10", "lr": "1e-3"},
    )
    found = rank_environment(plan, plan.nodes[1], Rank(3), PATHS, {"HOME": "/home"}, {})
    assert found == {
        "HOME": "/home",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.2",
        "MASTER_PORT": "29500",
        "EVERSTEP_JOB_NAME": "job",
        "EVERSTEP_RUN_ID": RUN,
        "EVERSTEP_GENERATION": "5",
        "EVERSTEP_HYPERPARAMETERS": '{"steps": "10", "lr": "1e-3"}',
        "EVERSTEP_OUTPUT_DIR": "/state/out",
        "SM_MODEL_DIR": "/state/out",
        "SM_OUTPUT_DATA_DIR": "/state/out",
        "EVERSTEP_AGENT_SOCKET": "/run/ranks.sock",
        "EVERSTEP_FINAL_ROUND_SECONDS": "30.0",
        "EVERSTEP_WELCOME_SECONDS": "30.0",
        "EVERSTEP_IS_ELASTIC": "0",
    }
    assert json.loads(found["EVERSTEP_HYPERPARAMETERS"]) == plan.script.hyperparameters


@pytest.mark.covers("CreateTrainingJob.Environment")
def test_the_user_wins_except_over_reserved_names() -> None:
    plan = rank_plan(
        environment={
            "OMP_NUM_THREADS": "4",
            "RANK": "9",
            "EVERSTEP_TOKEN": "x",
            "LOCAL_SIZE": "1",
            "MINE": "1",
            "GLOO_SOCKET_IFNAME": "eth7",
        }
    )
    found = rank_environment(plan, plan.nodes[0], Rank(0), PATHS, node_environment({"OMP_NUM_THREADS": "2"}, "lo"), {})
    assert (found["OMP_NUM_THREADS"], found["RANK"], found["MINE"], found["GLOO_SOCKET_IFNAME"]) == (
        "4",
        "0",
        "1",
        "eth7",
    )
    assert "LOCAL_SIZE" not in found
    assert "EVERSTEP_TOKEN" not in found


def test_what_a_launch_is_supplied_with_wins_over_the_user_and_not_over_the_agent() -> None:
    plan = rank_plan(environment={"SM_CHANNEL_TRAIN": "mine", "OTHER": "1"})
    found = rank_environment(plan, plan.nodes[0], Rank(0), PATHS, {}, {"SM_CHANNEL_TRAIN": "/theirs", "RANK": "9"})
    assert (found["SM_CHANNEL_TRAIN"], found["OTHER"], found["RANK"]) == ("/theirs", "1", "0")


def test_a_node_passes_on_its_environment_but_nothing_of_ours() -> None:
    found = node_environment(
        {
            **{
                "EVERSTEP_JOIN_TOKEN": "secret",
                "RANK": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "LOCAL_SIZE": "4",
                "PATH": "/bin",
            },
            **{"AWS_REGION": "r", "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_EC2_METADATA_DISABLED": "false"},
            **dict.fromkeys(AWS_KEYS, "the node's"),
        },
        "lo",
    )
    programs = os.path.dirname(sys.executable)
    assert found == {
        "AWS_REGION": "r",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "PATH": f"{programs}{os.pathsep}/bin",
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "6",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert node_environment(found, "lo") == found
    at_home = node_environment({"HOME": "/home/me"}, "lo")
    assert Path(at_home["TORCH_EXTENSIONS_DIR"]).parent == Path("/home/me/.cache/torch_extensions")
    assert node_environment(at_home, "lo") == at_home
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & node_environment({}, "").keys()
    assert node_environment({"NCCL_SOCKET_IFNAME": "^docker0"}, "ens5")["NCCL_SOCKET_IFNAME"] == "^docker0"


def test_environments_that_share_a_home_compile_no_extension_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TORCH_EXTENSIONS_DIR": "/shared"}
    ours = node_environment(given, "lo")
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    rank_environment_module.environment_key.cache_clear()
    theirs = node_environment(given, "lo")
    monkeypatch.undo()
    rank_environment_module.environment_key.cache_clear()
    layers = [with_packages(ours, folder) for folder in ("/state/packages/a", "/state/packages/b")]
    folders = {each["TORCH_EXTENSIONS_DIR"] for each in (ours, theirs, *layers)}
    assert len(folders) == 4
    assert {os.path.dirname(folder) for folder in folders} == {"/shared"}
    assert with_packages(ours, "") == ours
    assert with_packages(given, "/state/packages/a") == given, "the job has chosen it"


def test_another_user_inherits_nothing_that_leads_to_folders_of_the_agents() -> None:
    inherited = {
        "HOME": "/home/agent",
        "USER": "root",
        "XDG_CACHE_HOME": "/home/agent/.cache",
        "TORCH_EXTENSIONS_DIR": "/home/agent/built",
        "PATH": "/bin",
        "SUDO_UID": "7",
    }
    assert inherited_as({}, inherited) == inherited
    found = inherited_as(RankUser(5, 6, (), "ranks").identity(Path("/home-of-a-run")), inherited)
    assert found == {"HOME": "/home-of-a-run", "USER": "ranks", "LOGNAME": "ranks", "PATH": "/bin"}


def test_a_job_may_become_a_determinism_check_and_a_node_may_not_make_it_one() -> None:
    plan = rank_plan(environment={CHECK_VARIABLE: "8", "EVERSTEP_TOKEN": "x"})
    inherited = node_environment({CHECK_VARIABLE: "9"}, "lo")
    assert CHECK_VARIABLE not in inherited
    found = rank_environment(plan, plan.nodes[0], Rank(0), PATHS, inherited, {})
    assert found[CHECK_VARIABLE] == "8"
    assert "EVERSTEP_TOKEN" not in found


def test_reserved_names() -> None:
    assert all(map(is_reserved, ("RANK", "LOCAL_SIZE", "EVERSTEP_ANYTHING", "TORCHELASTIC_USE_AGENT_STORE")))
    assert not any(map(is_reserved, ("OMP_NUM_THREADS", "NCCL_DEBUG", "PATH", "RANKS")))


@pytest.mark.covers("CreateTrainingJob.Arguments")
def test_hyperparameters_are_arguments_in_their_order() -> None:
    script = structs.replace(
        rank_plan().script, hyperparameters={"b": "-1e-4", "a": "x y", "flag": ""}, arguments=("--fp16", "a=b", "")
    )
    assert rank_arguments(script) == ("--b=-1e-4", "--a=x y", "--flag=", "--fp16", "a=b", "")


def test_the_files_of_a_rank(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, RUN, Generation(3), Rank(1))
    files.make()
    files.make()
    assert files.stdout == tmp_path / "logs" / RUN / "gen=3" / "rank=1.stdout"
    assert files.output_dir == tmp_path / "outputs" / RUN / "gen=3" / "rank=1"
    assert files.output_dir.is_dir()
    assert files.output_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("data", "limit", "expected"),
    [
        (b"", 10, ""),
        (b"short\n", 10, "short\n"),
        (b"one\ntwo\nthree\n", 10, "two\nthree\n"),
        (b"one\ntwo\nthree\n", 9, "three\n"),
        (b"0123456789abcdef", 4, "cdef"),
        (b"0123456789\n", 4, "789\n"),
        (b"\xff\xfe", 10, "\ufffd\ufffd"),
    ],
)
def test_last_lines(tmp_path: Path, data: bytes, limit: int, expected: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    assert last_lines(path, limit) == expected


def test_last_lines_keep_to_their_limit_and_need_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * 10_000)
    assert 0 < len(last_lines(path).encode()) <= 4096
    assert last_lines(tmp_path / "none") == ""
