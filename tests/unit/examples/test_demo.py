"""The demo passes only if both runs have identical states and losses, and if the expected incident occurred."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.local_cloud.up import PartStatus

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo"
WORLD_SIZE = 2


@pytest.fixture(autouse=True)
def demo_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO))


def write_run(folder: Path, weights: bytes = bytes(range(64)), losses: tuple[float, ...] = (2.5, 1.25, 1.1)) -> Path:
    for rank in range(WORLD_SIZE):
        place = folder / f"rank={rank}"
        place.mkdir(parents=True)
        entries = {
            "model.w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
            "optimizer.exp_avg": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]},
        }
        header = json.dumps(entries).encode()
        (place / f"state-rank{rank}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
        (place / f"losses-rank{rank}.json").write_text(json.dumps({"losses": losses}))
    return folder


def verdict(run: Path, reference: Path) -> list[str]:
    from comparison import differences, read_run

    found: list[str] = differences(read_run(run, WORLD_SIZE), read_run(reference, WORLD_SIZE))
    return found


def test_equal_runs_are_identical(tmp_path: Path) -> None:
    assert verdict(write_run(tmp_path / "run"), write_run(tmp_path / "reference")) == []


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("bit", [0, 7, 255, 256, 511])
@pytest.mark.parametrize("side", ["run", "reference"])
def test_one_flipped_bit_of_the_state_is_a_difference(tmp_path: Path, side: str, bit: int, rank: int) -> None:
    for name in ("run", "reference"):
        write_run(tmp_path / name)
    file = tmp_path / side / f"rank={rank}" / f"state-rank{rank}.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) - 64 + bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    assert len(verdict(tmp_path / "run", tmp_path / "reference")) == 1


def test_one_flipped_bit_of_a_loss_is_a_difference(tmp_path: Path) -> None:
    (nearly,) = struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", 1.25))[0] ^ 1))
    run, reference = write_run(tmp_path / "run", losses=(2.5, nearly, 1.1)), write_run(tmp_path / "reference")
    assert verdict(run, reference) == [
        f"rank {rank}: 1 losses differ, the first at step 2" for rank in range(WORLD_SIZE)
    ]


def test_a_renamed_or_reshaped_tensor_is_a_difference(tmp_path: Path) -> None:
    run, reference = write_run(tmp_path / "run"), write_run(tmp_path / "reference")
    file = run / "rank=1" / "state-rank1.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[4, 2]", b"[2, 4]"))
    assert len(verdict(run, reference)) == 1


def test_a_missing_loss_or_rank_does_not_pass(tmp_path: Path) -> None:
    run, reference = write_run(tmp_path / "run", losses=(2.5, 1.25)), write_run(tmp_path / "reference")
    assert len(verdict(run, reference)) == WORLD_SIZE
    (run / "rank=1" / "losses-rank1.json").unlink()
    with pytest.raises(FileNotFoundError):
        verdict(run, reference)


def incident(**changes: Any) -> dict[str, Any]:
    return {"Cause": "rank_exit", "RestoreSource": "local", "LostSteps": 1, "FromStep": 40, **changes}


def story() -> list[dict[str, Any]]:
    return [
        incident(),
        incident(Cause="instance_terminated", RestoreSource="peer"),
        incident(Cause="group_lost", RestoreSource="s3", LostSteps=20),
    ]


def test_the_expected_story_passes() -> None:
    import demo

    demo.check(story(), {"first_loss": 5.0, "last_loss": 2.0})


@pytest.mark.parametrize(
    "changes",
    [{"RestoreSource": "s3"}, {"LostSteps": 4}, {"FromStep": 0}, {"Cause": "instance_terminated"}],
)
def test_an_incident_that_shows_something_else_fails_the_demo(changes: dict[str, Any]) -> None:
    import demo

    with pytest.raises(demo.DemoFailed):
        demo.check([incident(**changes), *story()[1:]], {"first_loss": 5.0, "last_loss": 2.0})


def test_a_loss_that_does_not_fall_fails_the_demo() -> None:
    import demo

    with pytest.raises(demo.DemoFailed, match="did not fall"):
        demo.check(story(), {"first_loss": 5.0, "last_loss": 4.9})


def test_preflight_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import preflight

    monkeypatch.setattr(sys.modules["preflight"].platform, "system", lambda: "Darwin")
    assert preflight.obstacles() == [
        "Everstep needs Linux (memfd, pidfd); this is Darwin. Use a Linux machine or container."
    ]


class Cluster:
    """A fake of a local cluster, which runs until its context manager exits."""

    endpoint_url, state_dir = "http://127.0.0.1:1", Path("state")
    token_file = logs = nodes_directory = Path("state/admin_token")

    def __init__(self, *_: object, **__: object) -> None:
        self.is_up = False

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_up = False

    def up(self, _: object) -> None:
        self.is_up = True

    def status(self) -> list[PartStatus]:
        return []


@pytest.mark.parametrize("failure", ["", "nothing moved"])
def test_with_keep_the_cluster_stays_up_however_the_story_ended(
    failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    import demo

    class Told:
        def __init__(self, cluster: Cluster, console: Any) -> None:
            self.cluster, self.console = cluster, console
            stayed.append(cluster)

        def run(self) -> dict[str, Any]:
            if failure:
                raise demo.DemoFailed(failure)
            return {"final_digest": "0" * 64, "first_loss": 5.0, "last_loss": 2.0, "seconds": 1.0}

    stayed: list[Cluster] = []
    was_up: list[bool] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "LocalCluster", Cluster)
    monkeypatch.setattr(demo, "Demo", Told)
    monkeypatch.setattr(demo, "stay", lambda *_: was_up.append(stayed[0].is_up))
    monkeypatch.setattr(demo, "exit_when_asked", lambda **_: None)
    monkeypatch.delenv("KEEP", raising=False)
    assert demo.main() == (1 if failure else 0)
    assert was_up == []
    assert "dashboard: http://127.0.0.1:1" in capsys.readouterr().out
    monkeypatch.setenv("KEEP", "1")
    stayed.clear()
    assert demo.main() == (1 if failure else 0)
    assert was_up == [True]
    assert not stayed[0].is_up


def test_a_demo_that_is_up_is_neither_cleared_nor_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    import demo

    class Up(Cluster):
        def status(self) -> list[PartStatus]:
            return [PartStatus(name="control-plane", pid=1, is_alive=True, url="", log="")]

        def up(self, _: object) -> None:
            raise AssertionError("the cluster that is up was started again")

    kept = tmp_path / demo.HOME / "report.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "LocalCluster", Up)
    assert demo.main() == 1
    assert kept.is_file()
    assert "the demo is up already" in capsys.readouterr().out


def test_a_checkout_without_the_dashboard_says_how_to_build_it() -> None:
    import demo

    assert "make web" in demo.dashboard("http://127.0.0.1:1", Path("token"), is_built=False)
    assert "make web" not in demo.dashboard("http://127.0.0.1:1", Path("token"), is_built=True)
