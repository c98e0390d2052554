"""The schedule of faults: seeded, even, and free of what has come already."""

import json
from collections import Counter
from pathlib import Path

from rollmill.config import FaultKind, FaultsConfig
from rollmill.loop.fault_plan import plan_faults
from rollmill.loop.faults import FaultInjector


def test_faults_are_off_by_default() -> None:
    assert plan_faults(FaultsConfig(), num_steps=1000, requests_per_step=8) == []


def test_each_kind_comes_equally_often_and_the_seed_says_when() -> None:
    config = FaultsConfig(every=3, seed=5)
    plan = plan_faults(config, num_steps=3 * 14, requests_per_step=8)
    assert [fault.step for fault in plan] == list(range(3, 43, 3))
    assert set(Counter(fault.kind for fault in plan).values()) == {2}
    assert Counter(fault.kind for fault in plan).keys() == set(FaultKind)
    assert all(0 <= fault.after_requests < 8 and 0 <= fault.choice < 1 for fault in plan)
    assert plan == plan_faults(config, num_steps=3 * 14, requests_per_step=8)
    other = plan_faults(FaultsConfig(every=3, seed=6), num_steps=3 * 14, requests_per_step=8)
    assert [fault.kind for fault in other] != [fault.kind for fault in plan]


def test_a_longer_run_has_the_same_faults_and_then_more() -> None:
    config = FaultsConfig(every=2)
    short = plan_faults(config, num_steps=10, requests_per_step=8)
    assert plan_faults(config, num_steps=30, requests_per_step=8)[: len(short)] == short


def test_a_fault_that_came_before_a_resume_does_not_come_again(tmp_path: Path) -> None:
    plan = plan_faults(FaultsConfig(every=2), num_steps=6, requests_per_step=8)
    log = tmp_path / "faults.jsonl"
    log.write_text(json.dumps({"step": 2, "kind": plan[0].kind}) + '\n{"step": 4, "ki')
    injector = FaultInjector(plan, log, pause_s=1.0)
    injector.step_began(6)
    assert [fault.step for fault in injector._due] == [4, 6], "the torn line does not count"
