"""Evaluation on engines of its own: one version, while training goes on."""

from pathlib import Path

import pytest

from rollmill.config.load import parse_config
from rollmill.errors import ConfigError
from rollmill.telemetry.samples import read_samples
from support.tiny_run import metrics_of, rollmill, write_tiny_run

STEPS = 4


def test_an_evaluation_holds_its_version_while_training_goes_on(tmp_path: Path) -> None:
    config = write_tiny_run(
        tmp_path,
        run__num_steps=STEPS,
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=4,
        rollout__asynchronous=True,
        engine__num_engines=2,
        eval__num_engines=1,
        eval__every=2,
    )
    run = tmp_path / "run"

    finished = rollmill("train", config)

    assert finished.returncode == 0, finished.stderr
    evaluated = metrics_of(run, "eval")
    assert [record["step"] for record in evaluated] == [0, 2, 4]
    assert all("eval/sorted/pass@1" in record for record in evaluated)
    for step in (0, 2, 4):
        answers = read_samples(run / "eval" / "sorted" / f"step_{step:06d}.parquet")
        assert {int(v) for s in answers for v in s.weight_versions} == {step}
    assert (run / "logs" / "engine_1.log").exists()

    again = rollmill("train", config)
    assert again.returncode == 0, again.stderr
    assert metrics_of(run, "eval") == evaluated, "what was evaluated is not evaluated again"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"num_engines": 2}, "expected fewer than the 2 of engine"),
        ({"urls": ["http://a", "http://b"]}, "expected fewer than the 2 of engine"),
        ({"num_engines": 3, "offload": True}, "does not go together with engine.offload"),
    ],
)
def test_engines_must_be_left_for_training(engine: dict[str, object], message: str) -> None:
    values = {
        "model": {"path": "model"},
        "data": {"path": "train.jsonl"},
        "engine": engine,
        "eval": {"num_engines": 2},
    }
    with pytest.raises(ConfigError, match=message):
        parse_config(values)
