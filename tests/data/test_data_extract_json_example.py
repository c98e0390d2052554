"""The extract-JSON example: its data, its reward, its configuration."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollmill.config.load import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLD = {"name": "Vera", "age": 34, "city": "Oslo"}


@pytest.fixture(scope="module")
def reward():
    spec = importlib.util.spec_from_file_location(
        "extract_json_reward", EXAMPLES / "extract_json" / "reward.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda response: module.reward(SimpleNamespace(response=response, label=GOLD))


def make_data(out, seed=0):
    script = EXAMPLES / "extract_json" / "make_data.py"
    subprocess.run(
        [sys.executable, script, "--out", out, "--seed", str(seed)], check=True, timeout=60
    )
    return [
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    ]


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ('{"name": "Vera", "age": 34, "city": "Oslo"}', 1),
        ('\n{"city":"Oslo","age":34,"name":"Vera"} ', 1),
        ('Here: {"name": "Vera", "age": 34, "city": "Oslo"}', 0.5),
        ('{"name": "Vera", "age": 34, "city": "Oslo"}{"name": "Vera"}', 0.5),
        ('{"name": "Vera", "age": "34", "city": "Oslo"}', 1 / 3),
        ('{"name": "Vera", "age": 34.0, "city": "Oslo"}', 1 / 3),
        ('{"name": "Vera", "age": 34, "city": "Oslo", "extra": 1}', 0.5),
        ('{"name": "Anna", "name": "Vera", "age": 34, "city": "Oslo"}', 0),
        ('{broken {"name": "Vera"}', 1 / 6),
        ('{"name": "Anna"}', 0),
        ('[{"name": "Vera", "age": 34, "city": "Oslo"}]', 0.5),
        ("Vera is 34 and lives in Oslo", 0),
        ('{"name": "Vera", "age": NaN, "city": "Oslo"}', 1 / 3),
        ("{" * 100_000, 0),
        ("", 0),
    ],
)
def test_the_reward(reward, response, value):
    assert reward(response) == pytest.approx(value)


def test_training_and_held_out_prompts_share_no_name_and_no_city(tmp_path):
    train, held_out = make_data(tmp_path)
    assert (len(train), len(held_out)) == (512, 128)
    for key in ("name", "city"):
        assert not {row["label"][key] for row in train} & {row["label"][key] for row in held_out}
    assert all(18 <= row["label"]["age"] <= 80 for row in train + held_out)
    assert len({row["prompt"] for row in train + held_out}) == 640
    for row in train + held_out:
        assert all(str(value) in row["prompt"] for value in row["label"].values())


def test_the_same_seed_writes_the_same_data(tmp_path):
    first = make_data(tmp_path / "a", seed=3)
    assert make_data(tmp_path / "b", seed=3) == first
    assert make_data(tmp_path / "c", seed=4) != first


@pytest.mark.parametrize("name", ["extract_json", "reasoning_gym"])
def test_the_configuration_is_valid(name):
    config = load_config(EXAMPLES / name / "config.yaml")
    assert config.data.system_prompt is not None
    assert config.eval.datasets
