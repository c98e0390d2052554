"""Procedural tasks as data, and their graders."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rollmill.config import DatasetConfig
from rollmill.data import load_rows
from rollmill.data.reasoning_gym import extract_answer, reward, score, task_rows
from rollmill.errors import DataError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)

PARAMS = {"size": 5, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def entries(seed=1, **params):
    return [row.load() for row in task_rows("chain_sum", {**PARAMS, **params}, seed)]


def test_entries_carry_question_answer_and_origin():
    first = entries()[0]
    left, sign, right = first["question"].partition(": ")[2].removesuffix(" =").split()
    total = int(left) + int(right) if sign == "+" else int(left) - int(right)
    assert first["answer"] == str(total)
    assert first["metadata"]["reasoning_gym"]["index"] == 0
    assert first["metadata"]["reasoning_gym"]["params"]["seed"] == 1


def test_the_tasks_own_seed_wins_over_the_runs():
    assert entries(seed=1) == entries(seed=1)
    assert entries(seed=1) != entries(seed=2)
    questions = [
        [row.load()["question"] for row in task_rows("chain_sum", {**PARAMS, "seed": 9}, run_seed)]
        for run_seed in (1, 2)
    ]
    assert questions[0] == questions[1]


def test_gold_scores_full_and_others_do_not():
    for entry in entries():
        assert score(entry["metadata"], entry["answer"]) == 1.0
        assert score(entry["metadata"], "1234567") < 1.0
        assert score(entry["metadata"], None) == 0.0


def test_entries_whose_own_metadata_is_no_json_are_graded_exactly():
    row = next(task_rows("countdown", {"size": 1}, 3)).load()
    gold = row["answer"]
    assert score(row["metadata"], gold) == 1.0
    assert score(row["metadata"], "1 + 1") < 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("7", "7"),
        (" 7\n", "7"),
        ("thinking</think> 7", "7"),
        ("<answer>6</answer> no, <answer> 7 </answer>.", "7"),
        ("<think>a", "<think>a"),
        ("", None),
        ("a</think>", None),
    ],
)
def test_the_answer_in_a_response(response, answer):
    assert extract_answer(response) == answer


def test_the_reward_judges_the_response():
    entry = entries()[0]
    sample = SimpleNamespace(
        response=f"so <answer>{entry['answer']}</answer>", metadata=entry["metadata"]
    )
    assert reward(sample) == 1.0


def test_a_task_is_a_data_set_whatever_the_keys_for_files_are(tokenizer):
    config = DatasetConfig(
        reasoning_gym="chain_sum", reasoning_gym_params=PARAMS, prompt_key="text", max_rows=3
    )
    rows = load_rows(config, tokenizer=tokenizer, seed=1)
    assert [row.prompt for row in rows] == [entry["question"] for entry in entries()[:3]]
    assert rows[2].row_id == "reasoning_gym.chain_sum:2"


def test_an_unknown_task_suggests_near_names():
    with pytest.raises(DataError) as caught:
        task_rows("chain_summ", {}, 0)
    assert "chain_sum" in caught.value.fix


@pytest.mark.parametrize("params", [{"siz": 3}, {"min_terms": 5, "max_terms": 2}])
def test_parameters_the_task_does_not_take_are_refused(params):
    with pytest.raises(DataError) as caught:
        task_rows("chain_sum", params, 0)
    assert caught.value.where == "data.reasoning_gym_params"


def test_a_sample_from_elsewhere_cannot_be_scored():
    with pytest.raises(DataError, match="reasoning-gym"):
        score({}, "7")


def test_tasks_work_without_the_package_that_needs_a_compiler():
    program = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'pycosat' else found(n, *a)\n"
        "from rollmill.data.reasoning_gym import task_rows\n"
        "print(next(task_rows('chain_sum', {'size': 1}, 0)).load()['answer'])\n"
        "from rollmill.errors import DataError\n"
        "try:\n"
        "    next(task_rows('zebra_puzzles', {'size': 1}, 0)).load()\n"
        "except DataError as error:\n"
        "    print(error.fix)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    answer, fix = done.stdout.splitlines()
    assert answer.lstrip("-").isdigit()
    assert fix.startswith("pip install pycosat")
