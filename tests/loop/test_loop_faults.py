"""A run with a fault every other step ends as one without: a short soak (bench/soak.py is long)."""

import json
from pathlib import Path

from rollmill.config import FaultKind
from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report
from rollmill.telemetry.samples import read_samples
from support.processes import processes_of
from support.tiny_run import metrics_of, rollmill, write_tiny_run

STEPS, GROUPS, N = 17, 4, 4
QUICK_HEALTH = {
    "engine__health_interval_s": 0.5,
    "engine__health_timeout_s": 3.0,
    "engine__health_strikes": 2,
}


def test_every_kind_of_fault_costs_no_prompt_and_no_step(tmp_path: Path) -> None:
    config = write_tiny_run(
        tmp_path,
        run__num_steps=STEPS,
        run__save_every=2,
        run__stall_timeout_s=60.0,
        rollout__batch_size=GROUPS,
        rollout__n_samples_per_prompt=N,
        rollout__asynchronous=True,
        rollout__max_staleness=2,
        faults__every=2,
        faults__pause_s=0.5,
        eval__datasets=[],
        **QUICK_HEALTH,
    )
    run = tmp_path / "run"

    finished = rollmill("train", config)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    log = (run / "faults.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["kind"] for line in log} == set(FaultKind)
    assert [json.loads(line)["step"] for line in log] == sorted(
        {json.loads(line)["step"] for line in log}
    ), "each came once"
    assert "going on from the newest checkpoint" in finished.stdout
    assert "was not saved" in finished.stdout
    trained = metrics_of(run, "train")
    assert [record["step"] for record in trained] == list(range(1, STEPS + 1))
    assert max(record["rollout/staleness_max"] for record in trained) <= 2
    assert sum(record["engine/deaths"] for record in trained) >= 1
    assert all(record["engine/redispatched_requests"] >= 0 for record in trained)
    groups = [
        {s.group_index for s in read_samples(run / "samples" / f"step_{step:06d}.parquet")}
        for step in range(1, STEPS + 1)
    ]
    assert len(set().union(*groups)) == sum(map(len, groups)) == STEPS * GROUPS
    report = read_report(run / "ledger.sqlite")
    assert report.balance[State.CONSUMED] == STEPS * GROUPS
    assert report.balance[State.IN_FLIGHT] == 0
    assert sum(report.balance.values()) == report.num_issued
    assert processes_of(tmp_path) == []
