"""The mistakes a new user makes, each with a message that says what to do."""

import socket
from pathlib import Path

import pytest

from support.tiny_run import rollmill, write_tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    write_tiny_run(folder, run__num_steps=1)
    return folder


def error_of(folder: Path, *overrides: str) -> str:
    """The error text of a run that must not start; never a traceback."""
    failed = rollmill("train", folder / "config.yaml", *overrides)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert "Traceback" not in failed.stderr
    assert "  where: " in failed.stderr
    assert "  fix: " in failed.stderr
    return failed.stderr


def test_misspelled_field_names_the_nearest_one(folder: Path) -> None:
    message = error_of(folder, "rollout.batchsize=4")
    assert "rollout.batchsize" in message
    assert "did you mean `batch_size`?" in message


def test_field_in_the_wrong_section_names_the_right_one(folder: Path) -> None:
    assert "`trainer.optimizer.lr`" in error_of(folder, "rollout.lr=4")


def test_missing_model_folder_is_named_with_the_nearest_one(folder: Path) -> None:
    message = error_of(folder, f"model.path={folder / 'modle'}")
    assert str(folder / "modle") in message
    assert str(folder / "model") in message


def test_missing_data_file_is_named(folder: Path) -> None:
    message = error_of(folder, "data.path=task/trian.jsonl")
    assert "trian.jsonl" in message
    assert "train.jsonl" in message


def test_bad_json_row_is_named_by_file_and_line(folder: Path) -> None:
    bad = folder / "bad.jsonl"
    bad.write_text('{"prompt": "12345", "label": "12345"}\n{"prompt": "1\n')
    message = error_of(folder, f"data.path={bad}")
    assert "bad.jsonl:2" in message


def test_one_answer_per_prompt_with_grpo_is_refused(folder: Path) -> None:
    message = error_of(folder, "rollout.n_samples_per_prompt=1")
    assert "grpo compares the answers to one prompt" in message
    assert "expected 2 or more, found 1" in message


def test_batch_that_does_not_divide_is_refused(folder: Path) -> None:
    message = error_of(folder, "trainer.global_batch_size=100")
    assert "divisor" in message
    assert "256" in message
    assert "100" in message


def test_prompts_longer_than_the_context_are_refused_with_the_lengths(folder: Path) -> None:
    long = folder / "long.jsonl"
    long.write_text('{"prompt": "%s", "label": "1"}\n' % ("1" * 100))
    message = error_of(folder, f"data.path={long}")
    assert "31" in message, "the context of 32 less one token for the answer"
    assert "101" in message


def test_context_longer_than_the_model_is_refused(folder: Path) -> None:
    message = error_of(folder, "model.context_length=64")
    assert "model.context_length" in message
    assert "at most 32" in message


def test_reward_function_with_a_wrong_signature_shows_expected_and_found(folder: Path) -> None:
    (folder / "two.py").write_text("def reward(prompt, response):\n    return 1.0\n")
    message = error_of(folder, "reward.function=two.py:reward")
    assert "def reward(sample: RewardInput)" in message
    assert "def reward(prompt, response)" in message


def test_misspelled_reward_function_names_the_nearest_one(folder: Path) -> None:
    (folder / "one.py").write_text("def reward(sample):\n    return 1.0\n")
    assert "did you mean 'reward'?" in error_of(folder, "reward.function=one.py:rewrad")


def test_generate_function_that_is_not_async_is_refused(folder: Path) -> None:
    (folder / "gen.py").write_text("def generate(sample, context):\n    return sample\n")
    message = error_of(folder, "rollout.hooks.generate=gen.py:generate")
    assert "async def generate(sample: Sample, context: GenerateContext)" in message


def test_port_in_use_is_named_with_the_setting_to_change(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = error_of(folder, f"engine.port={port}")
    assert str(port) in message
    assert "engine.port" in message


def test_value_out_of_range_shows_the_range(folder: Path) -> None:
    message = error_of(folder, "rollout.sampling.top_p=1.5")
    assert "rollout.sampling.top_p" in message
    assert "≤ 1" in message


def test_missing_configuration_file_names_the_nearest_one(folder: Path) -> None:
    failed = rollmill("train", folder / "cofnig.yaml")
    assert failed.returncode == 2
    assert f"did you mean {folder / 'config.yaml'}?" in failed.stderr


def test_unknown_advantage_estimator_lists_the_known_ones(folder: Path) -> None:
    message = error_of(folder, "trainer.algorithm.advantage=gpro")
    assert "grpo" in message


def test_a_run_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    message = error_of(folder, f"run.dir={folder / 'config.yaml'}")
    assert "config.yaml" in message
    assert "choose another path" in message


def test_a_setting_with_dashes_is_shown_without(folder: Path) -> None:
    assert "settings have no dashes" in error_of(folder, "--trainer.optimizer.lr=1")


def test_a_run_in_which_nothing_judges_answers_does_not_start(folder: Path) -> None:
    message = error_of(folder, "reward.function=null")
    assert "nothing says how answers are judged" in message
    assert "reward: {type: math}" in message


def test_the_place_of_an_evaluation_sets_data_is_its_own(folder: Path) -> None:
    message = error_of(folder, "eval.datasets.0.data.path=task/no.jsonl")
    assert "evaluation set sorted: data.path" in message
