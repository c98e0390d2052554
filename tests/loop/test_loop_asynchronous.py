"""Training while the next answers are written: real engine, real trainer, tiny model."""

from pathlib import Path

import pytest

from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report
from rollmill.telemetry.samples import read_samples
from support.tiny import warm_start
from support.tiny_run import metrics_of, rollmill, write_tiny_run

STEPS = 12
GROUPS = 8


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_trained_token_is_older_than_the_bound_and_the_model_learns_from_all_of_them(
    tmp_path: Path, staleness: int
) -> None:
    config = write_tiny_run(
        tmp_path,
        run__num_steps=STEPS,
        rollout__batch_size=GROUPS,
        rollout__asynchronous=True,
        rollout__max_staleness=staleness,
        eval__datasets=[],
    )
    warm_start(tmp_path / "model", steps=40)
    run = tmp_path / "run"

    finished = rollmill("train", config)

    assert finished.returncode == 0, finished.stderr
    trained = metrics_of(run, "train")
    assert [record["step"] for record in trained] == list(range(1, STEPS + 1))
    ages = [record["rollout/staleness_max"] for record in trained]
    assert max(ages) <= staleness
    assert max(ages) >= 1, "answers were written ahead"
    for step in range(1, STEPS + 1):
        samples = read_samples(run / "samples" / f"step_{step:06d}.parquet")
        assert len(samples) == GROUPS * 8
        assert all(step - 1 - s.oldest_version <= staleness for s in samples)
    balance = read_report(run / "ledger.sqlite").balance
    assert balance[State.CONSUMED] == STEPS * GROUPS
    assert balance[State.IN_FLIGHT] == 0


def test_an_asynchronous_run_goes_on_from_its_checkpoint_and_trains_no_prompt_twice(
    tmp_path: Path,
) -> None:
    config = write_tiny_run(
        tmp_path,
        run__num_steps=3,
        run__save_every=2,
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=4,
        rollout__asynchronous=True,
        rollout__max_staleness=2,
        eval__datasets=[],
    )
    assert rollmill("train", config).returncode == 0
    again = rollmill("train", config, "run.num_steps=6")
    assert again.returncode == 0, again.stderr
    assert "resumed after step 3" in again.stdout
    run = tmp_path / "run"
    groups = [
        {s.group_index for s in read_samples(run / "samples" / f"step_{step:06d}.parquet")}
        for step in range(1, 7)
    ]
    assert len(set().union(*groups)) == sum(map(len, groups)) == 6 * 4
    assert read_report(run / "ledger.sqlite").balance[State.CONSUMED] == 24


def test_a_bound_of_0_trains_on_the_same_tokens_as_taking_turns(tmp_path: Path) -> None:
    steps = 3
    batches = []
    for asynchronous in (False, True):
        config = write_tiny_run(
            tmp_path / str(asynchronous),
            run__num_steps=steps,
            rollout__batch_size=4,
            rollout__n_samples_per_prompt=4,
            rollout__asynchronous=asynchronous,
            rollout__max_staleness=0,
            eval__datasets=[],
        )
        assert rollmill("train", config).returncode == 0
        folder = tmp_path / str(asynchronous) / "run" / "samples"
        batches.append(
            [
                (s.group_index, s.attempt, s.tokens.tolist(), s.weight_versions.tolist())
                for step in range(1, steps + 1)
                for s in read_samples(folder / f"step_{step:06d}.parquet")
            ]
        )
    assert batches[0] == batches[1]
    assert len(batches[0]) == steps * 4 * 4
