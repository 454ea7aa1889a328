from __future__ import annotations

from pathlib import Path

import pytest

from everstep.training.errors import SessionMisuse
from everstep.training.script import FINAL_ROUND_SECONDS, Environment, hyperparameters, input_dir, output_dir


def test_the_environment_wins_over_arguments_and_those_over_defaults() -> None:
    found = hyperparameters(
        variables={"EVERSTEP_HYPERPARAMETERS": '{"steps": "30", "is-fast": true}'},
        arguments=["--steps", "20", "--learning-rate", "1e-3", "--name=tiny"],
        steps=10,
        learning_rate=3e-4,
        name="small",
        is_fast=False,
        width=64,
    )
    assert vars(found) == {"steps": 30, "learning_rate": 1e-3, "name": "tiny", "is_fast": True, "width": 64}


def test_an_unknown_hyperparameter_is_named_with_the_most_similar_one() -> None:
    variables = {"EVERSTEP_HYPERPARAMETERS": '{"learning-rat": "1", "zzz": "2", "steps": "3"}'}
    with pytest.warns(UserWarning, match="no hyperparameter") as warned:
        found = hyperparameters(variables=variables, arguments=["--not-ours", "1"], learning_rate=1.0, steps=1)
    assert vars(found) == {"learning_rate": 1.0, "steps": 3}
    assert [str(each.message) for each in warned] == [
        "the script has no hyperparameter learning_rat; did you mean learning_rate?",
        "the script has no hyperparameter zzz",
    ]


@pytest.mark.parametrize(("default", "text"), [(1, "many"), (1, "1.5"), (True, "perhaps"), (0.1, "fast")])
def test_a_value_of_the_wrong_type_is_named(default: bool | int | float, text: str) -> None:
    with pytest.raises(SessionMisuse, match=f"hyperparameter size='{text}' is not a {type(default).__name__}"):
        hyperparameters(variables={}, arguments=["--size", text], size=default)


def test_outputs_go_where_the_environment_says(tmp_path: Path) -> None:
    path = output_dir({"EVERSTEP_OUTPUT_DIR": str(tmp_path / "a" / "b")})
    assert path.is_dir()
    assert path == tmp_path / "a" / "b"


def test_channels_are_where_the_agent_says_or_here(tmp_path: Path) -> None:
    given = {
        "EVERSTEP_AGENT_SOCKET": "/s",
        "EVERSTEP_INPUT_CHANNELS": '{"train": "/node/train"}',
        "SM_CHANNEL_TEST": "/other",
    }
    assert input_dir("train", given) == Path("/node/train")
    with pytest.raises(SessionMisuse, match="no input channel 'test'; its channels: train"):
        input_dir("test", given)
    assert input_dir("test-set", {"SM_CHANNEL_TEST_SET": "/mine"}) == Path("/mine")
    assert input_dir("test", {}) == Path("input/test")


def test_an_empty_environment_is_one_rank_alone() -> None:
    environment = Environment.read({})
    assert (environment.rank, environment.world_size, environment.agent_socket) == (0, 1, None)
    assert environment.final_round_seconds == FINAL_ROUND_SECONDS
    assert environment.local_rank == 0
    assert not environment.is_elastic, "an older agent does not set the variable"
    assert Environment.read({"EVERSTEP_IS_ELASTIC": "1"}).is_elastic
    assert Environment.read({"RANK": "11", "LOCAL_RANK": "3"}).local_rank == 3


def test_the_cores_of_a_node_are_shared_by_its_ranks() -> None:
    alone = Environment.read({}).cores
    assert alone >= 1
    assert Environment.read({"LOCAL_WORLD_SIZE": "4"}).cores == alone / 4
