"""Evaluation: each set by its own rules, results in data order, failures counted as failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import run

from rollmill.config import Config
from rollmill.config.evaluation import EvalDatasetConfig
from rollmill.errors import HookError, RollmillError
from rollmill.rollout.evaluate import Evaluator, eval_metrics
from rollmill.rollout.hooks import LoadedHooks
from rollmill.rollout.pass_at_k import mean_pass_at_k, pass_at_k
from rollmill.sample import Group
from rollmill.testing import FakeEngines, FakeTokenizer, make_group
from rollmill.testing.fakes import FakeCall

REWARD = "def reward(sample):\n    return float(len(sample.response.split()) % 2)\n"


def make_evaluator(
    tmp_path: Path, engines: Any, sets: list[dict[str, Any]], hooks: LoadedHooks | None = None
) -> Evaluator:
    (tmp_path / "reward.py").write_text(REWARD)
    datasets = []
    for number, settings in enumerate(sets):
        path = tmp_path / f"set{number}.jsonl"
        rows = [{"prompt": f"t{20 + i} t{number + 3}", "label": "x"} for i in range(6)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"path": str(path), "apply_chat_template": False}
        datasets.append({"name": f"set{number}", "data": data} | settings)
    config = Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"path": "none.jsonl"},
            "rollout": {"sampling": {"max_new_tokens": 16}},
            "reward": {"function": "reward.py:reward"},
            "eval": {"datasets": datasets, "max_concurrent_requests": 4},
        }
    )
    return Evaluator(
        config,
        engines=engines,
        tokenizer=FakeTokenizer(),
        context_length=64,
        hooks=hooks or LoadedHooks(),
        base_dir=tmp_path,
    )


def test_sets_have_their_own_sampling_and_number_of_answers_and_come_in_data_order(
    tmp_path: Path,
) -> None:
    engines = FakeEngines(lambda call: 2 + call.input_ids[0] % 5)
    sets = [{}, {"n_samples_per_prompt": 4, "sampling": {"max_new_tokens": 3, "temperature": 0.7}}]

    async def main() -> None:
        told: list[int] = []
        async with make_evaluator(tmp_path, engines, sets) as evaluator:
            assert evaluator.num_answers == 6 + 24
            result = await evaluator.run(5, told.append)
        assert sum(told) == 30
        for name, n in (("set0", 1), ("set1", 4)):
            groups = result.groups[name]
            assert [g.samples[0].prompt_tokens[0] for g in groups] == [20, 21, 22, 23, 24, 25]
            assert all(len(g.samples) == n for g in groups)
        asked = {(c.sampling["max_new_tokens"], c.sampling["temperature"]) for c in engines.calls}
        assert asked == {(16, 0.0), (3, 0.7)}
        assert set(result.metrics) >= {"eval/set0/pass@1", "eval/set1/pass@4", "eval/set1/reward"}
        assert "eval/set0/pass@2" not in result.metrics
        assert len({c.rid for c in engines.calls}) == 30

    run(main)


def test_a_failed_answer_is_counted_and_neither_wrong_nor_the_end(tmp_path: Path) -> None:
    engines = FakeEngines(3)  # two words and the end: reward 0

    def fault(call: FakeCall) -> None:
        if call.input_ids[0] == 21:
            raise OSError("gone")

    engines.fault = fault

    async def main() -> None:
        async with make_evaluator(tmp_path, engines, [{}]) as evaluator:
            result = await evaluator.run(0)
        assert result.metrics["eval/set0/failed"] == 1
        assert result.metrics["eval/set0/num_answers"] == 6
        assert result.metrics["eval/set0/reward"] == 0.0

    run(main)


def test_requests_of_an_evaluation_stay_within_its_share(tmp_path: Path) -> None:
    engines = FakeEngines(3)
    engines.hold()

    async def main() -> None:
        async with make_evaluator(tmp_path, engines, [{}, {}]) as evaluator:
            running = asyncio.create_task(evaluator.run(0))
            await engines.wait_for_calls(4)
            await asyncio.sleep(0)
            assert engines.num_running == 4
            engines.release()
            await running

    run(main)


def test_an_evaluation_and_a_log_function_of_ones_own(tmp_path: Path) -> None:
    async def only_the_second(context: Any) -> dict[str, float]:
        groups = await context.answer("set1")
        return context.metrics("set1", groups) | {"eval/mine": float(context.step)}

    hooks = LoadedHooks(
        evaluation=only_the_second, log_eval=lambda name, groups: {"groups": len(groups)}
    )

    async def main() -> None:
        async with make_evaluator(tmp_path, FakeEngines(3), [{}, {}], hooks) as evaluator:
            result = await evaluator.run(7)
        assert result.metrics["eval/mine"] == 7
        assert result.metrics["eval/set1/groups"] == 6
        assert list(result.groups) == ["set1"]

    run(main)


@pytest.mark.parametrize("fault", ["raises", "no mapping", "unknown set"])
def test_an_evaluation_of_ones_own_that_fails_is_named(tmp_path: Path, fault: str) -> None:
    async def broken(context: Any) -> Any:
        if fault == "raises":
            raise ValueError("mine")
        return await context.answer("nothing") if fault == "unknown set" else 3

    hooks = LoadedHooks(evaluation=broken)

    async def main() -> None:
        async with make_evaluator(tmp_path, FakeEngines(3), [{}], hooks) as evaluator:
            with pytest.raises(HookError, match=r"rollout\.hooks\.evaluation"):
                await evaluator.run(0)

    run(main)


def test_a_judge_that_does_not_start_leaves_none_of_the_others_running(tmp_path: Path) -> None:
    only_here = f"import os\nassert os.getpid() == {os.getpid()}\n{REWARD}"
    (tmp_path / "only_here.py").write_text(only_here)
    broken = {"function": "only_here.py:reward"}
    evaluator = make_evaluator(tmp_path, FakeEngines(4), [{}, {"reward": broken}])
    before = children_of(os.getpid())

    async def main() -> None:
        with pytest.raises(RollmillError):
            await evaluator.__aenter__()

    run(main)
    assert children_of(os.getpid()) <= before


def children_of(pid: int) -> set[int]:
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in paths for child in path.read_text().split()}


def test_metrics_of_nothing_are_no_error_and_no_reward_of_0() -> None:
    config = EvalDatasetConfig(name="none", data={"path": "x"})
    assert "eval/none/reward" not in eval_metrics(config, [], None)
    assert eval_metrics(config, [Group(0, [])], None)["eval/none/num_answers"] == 0.0


def test_pass_at_k_counts_judged_answers_and_leaves_short_prompts_out() -> None:
    config = EvalDatasetConfig(name="a", data={"path": "x"}, n_samples_per_prompt=4)
    groups = [make_group(0, (1.0, 0.0, 0.0, 0.0)), make_group(1, (1.0, 1.0, None, None))]
    metrics = eval_metrics(config, groups, None)
    assert metrics["eval/a/pass@1"] == pytest.approx((0.25 + 1.0) / 2)
    assert metrics["eval/a/pass@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["eval/a/pass@4"] == pytest.approx(1.0)  # the second has two answers only
    assert metrics["eval/a/failed"] == 2


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - (2 / 4) * (1 / 3))
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(10, 1, 10) == 1.0
    assert mean_pass_at_k([(1, 1)], 2) is None
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(4, 2, 5)


@given(n=st.integers(1, 40), data=st.data())
def test_pass_at_k_grows_with_k_and_with_right_answers(n: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, n))
    values = [pass_at_k(n, right, k) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(right / n)
    assert all(0 <= a <= b + 1e-12 <= 1 + 1e-9 for a, b in itertools.pairwise(values))
    if right < n:
        assert pass_at_k(n, right + 1, 1) > values[0]
