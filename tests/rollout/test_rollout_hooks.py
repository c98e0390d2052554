"""Hooks: told at start-up when they do not fit; the examples keep their contracts; whole parts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import SlowRows, make_side, run

from rollmill.config.rollout import RolloutHooks
from rollmill.data.ledger import State
from rollmill.errors import HookError
from rollmill.rollout.batch_hooks import extra_metrics
from rollmill.rollout.custom import RolloutContext
from rollmill.rollout.hooks import SIGNATURES, LoadedHooks, load_hooks
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.testing import FakeEngines, check_hook, make_context, make_sample

EXAMPLES = Path(__file__).parents[2] / "examples" / "hooks"
EXAMPLE_OF = [
    ("generate", "generate.py:with_calculator"),
    ("generate", "generate.py:answer_and_check"),
    ("sample", "samples.py:strip_response"),
    ("sample_filter", "samples.py:only_whole_answers"),
    ("reward_post_process", "samples.py:shorter_is_better"),
    ("all_samples", "samples.py:count_samples"),
    ("batch_converter", "samples.py:first_sibling_only"),
    ("log_rollout", "samples.py:question_marks"),
    ("log_eval", "samples.py:longest_answer"),
    ("buffer_policy", "filters.py:longest_first"),
    ("data_source", "source.py:additions"),
    ("rollout", "whole.py:two_at_a_time"),
    ("evaluation", "whole.py:one_set_after_the_other"),
    ("dynamic_filter", "filters.py:some_right_some_wrong"),
    ("over_sampling_filter", "filters.py:hardest_first"),
    ("reward", "rewards.py:exact"),
    ("group_reward", "rewards.py:best_of_group"),
]


@pytest.mark.parametrize(("name", "path"), EXAMPLE_OF)
def test_every_example_keeps_its_contract(name: str, path: str) -> None:
    check_hook(name, path, base_dir=EXAMPLES)


def test_every_hook_of_the_configuration_has_a_signature_and_an_example() -> None:
    assert set(RolloutHooks.model_fields) == set(SIGNATURES)
    assert set(SIGNATURES) <= {name for name, _ in EXAMPLE_OF}
    readme = (EXAMPLES / "README.md").read_text()
    assert all(path in readme for _, path in EXAMPLE_OF)


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_a_wrong_signature_is_told_before_the_run_with_expected_and_found(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "mine.py").write_text("def wrong(a, b, c, d):\n    return None\n")
    with pytest.raises(HookError) as caught:
        load_hooks(RolloutHooks(**{name: "mine.py:wrong"}), tmp_path)
    assert f"rollout.hooks.{name}" in str(caught.value)
    assert SIGNATURES[name].render("wrong") in str(caught.value)
    assert "def wrong(a, b, c, d)" in str(caught.value)


BROKEN = {
    "generate, other identity": (
        "generate",
        "async def f(sample, context):\n"
        "    await context.extend(sample)\n"
        "    sample.attempt += 1\n"
        "    return sample\n",
    ),
    "generate, finished though aborted": (
        "generate",
        "from rollmill.sample import Status\n"
        "async def f(sample, context):\n"
        "    sample.status = Status.PENDING\n"
        "    return sample\n",
    ),
    "generate, made-up log-probs": (
        "generate",
        "from rollmill.sample import Segment, Status\n"
        "async def f(sample, context):\n"
        "    sample.segments.append(Segment.from_engine([5, 6], [-9.0, -9.0], 0))\n"
        "    sample.status = Status.COMPLETED\n"
        "    return sample\n",
    ),
    "generate, shared state": (
        "generate",
        "SEEN = []\n"
        "async def f(sample, context):\n"
        "    SEEN.append(1)\n"
        "    return await context.with_sampling(max_new_tokens=len(SEEN)).extend(sample)\n",
    ),
    "generate, over the limit": (
        "generate",
        "from rollmill.sample import Status\n"
        "async def f(sample, context):\n"
        "    while sample.response_length < 90:\n"
        "        result = await context.call(sample, sample.tokens, 30)\n"
        "        sample.segments += result.to_segments()\n"
        "        if not result.num_tokens: break\n"
        "    sample.status = Status.COMPLETED\n"
        "    return sample\n",
    ),
    "reward, text": ("reward", "def f(sample):\n    return 'good'\n"),
    "group reward, too few": ("group_reward", "def f(samples):\n    return [1.0]\n"),
    "converter, drops a group": ("batch_converter", "def f(groups):\n    return groups[1:]\n"),
    "post-process, no reward": (
        "reward_post_process",
        "def f(groups):\n    groups[0].samples[0].reward = None\n",
    ),
    "policy, too many": ("buffer_policy", "def f(waiting, n):\n    return waiting\n"),
    "ranking, too few": ("over_sampling_filter", "def f(groups):\n    return groups[:1]\n"),
    "log, no numbers": ("log_rollout", "def f(groups):\n    return {'a': 'b'}\n"),
    "filter, no answer": ("dynamic_filter", "def f(group):\n    return None\n"),
    "sample hook, changes tokens": (
        "sample",
        "def f(sample):\n    sample.segments = []\n",
    ),
    "source, no source": ("data_source", "def f(context):\n    return object()\n"),
    "rollout, too few": (
        "rollout",
        "async def f(context):\n    return [await context.answer(context.take(1)[0])]\n",
    ),
    "rollout, keeps failed ones unanswered": (
        "rollout",
        "async def f(context):\n    return context.take(context.batch_size)\n",
    ),
    "evaluation, no metrics": ("evaluation", "async def f(context):\n    return context.sets\n"),
    "no such kind": ("nothing", "def f():\n    pass\n"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_the_contract_check_finds_what_is_wrong(tmp_path: Path, case: str) -> None:
    name, source = BROKEN[case]
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(HookError):
        check_hook(name, "mine.py:f", base_dir=tmp_path)


def test_a_tool_result_is_in_the_context_and_not_in_the_loss() -> None:
    async def main() -> None:
        hooks = load_hooks(RolloutHooks(generate="generate.py:with_calculator"), EXAMPLES)
        context = make_context(FakeEngines(5))
        sample = make_sample()
        answers = ["t1 <sum>1 + 2</sum>", "t1 <sum>1 + 2</sum> 3 so 3"]
        extend = context.extend

        async def scripted(sample: Sample) -> Sample:
            await extend(sample)
            sample.response = answers.pop(0)
            return sample

        object.__setattr__(context, "extend", scripted)
        await hooks.generate(sample, context)
        assert [s.source for s in sample.segments] == ["engine", "environment", "engine"]
        assert sample.loss_mask.tolist() == [True] * 5 + [False] + [True] * 5
        assert not answers

    run(main)


def test_batch_hooks_run_in_order_on_the_sorted_batch(tmp_path: Path) -> None:
    seen: list[str] = []

    def sample_filter(groups: list[Group]) -> None:
        seen.append("filter")
        assert [g.group_index for g in groups] == [0, 1, 2, 3]
        groups[0].samples[0].in_loss = False

    def post(groups: list[Group]) -> None:
        seen.append("post")
        groups[1].samples[0].reward = 5.0

    def everything(kept: list[Group], rejected: list[Group]) -> None:
        seen.append("all")
        assert (len(kept), len(rejected)) == (4, 1)

    def convert(groups: list[Group]) -> list[Group]:
        seen.append("convert")
        return [Group(g.group_index, g.samples) for g in groups]

    def log(groups: list[Group]) -> dict[str, float]:
        seen.append("log")
        return {"rollout/mine": 3.0}

    def fault(call: Any) -> None:
        if call.input_ids[0] == 102:
            raise OSError("row 2")

    engines = FakeEngines(4)
    engines.fault = fault
    hooks = LoadedHooks(
        sample_filter=sample_filter,
        reward_post_process=post,
        all_samples=everything,
        batch_converter=convert,
        log_rollout=log,
    )
    hooks_ok = make_side(tmp_path, engines, hooks=hooks)

    async def main() -> None:
        def sorted_filter(groups: list[Group]) -> None:
            seen.append("filter")
            groups[0].samples[0].in_loss = False

        object.__setattr__(hooks, "sample_filter", sorted_filter)
        batch = await hooks_ok.train()
        assert seen == ["filter", "post", "all", "convert", "log"]
        assert [g.group_index for g in batch.groups] == [0, 1, 3, 4]
        assert not batch.groups[0].samples[0].loss_mask.any()
        assert batch.groups[1].samples[0].reward == 5.0
        assert batch.metrics["rollout/mine"] == 3.0
        hooks_ok.check_books()

    run(main)


def test_a_log_function_that_fails_costs_its_figures_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken(groups: list[Group]) -> dict[str, float]:
        raise KeyError("mine")

    assert extra_metrics(broken, [], "rollout.hooks.log_rollout") == {}
    assert "rollout.hooks.log_rollout failed" in caplog.text


def test_a_whole_rollout_function_is_booked_like_the_built_in_one(tmp_path: Path) -> None:
    hooks = load_hooks(RolloutHooks(rollout="whole.py:two_at_a_time"), EXAMPLES)
    side = make_side(tmp_path, FakeEngines(4), hooks=hooks, config={"batch_size": 3})

    async def main() -> None:
        batch = await side.train()
        assert [g.group_index for g in batch.groups] == [0, 1, 2]
        assert side.ledger.state_of(3) is State.REJECTED  # answered and not used
        assert batch.metrics["rollout/rejected/not_used"] == 1
        side.check_books()
        await side.train()
        assert side.ledger.balance()[State.CONSUMED] == 6
        side.check_books()

    run(main)


@pytest.mark.parametrize("fault", ["raises", "short", "unanswered", "stranger", "nothing"])
def test_a_rollout_function_that_breaks_its_contract_ends_the_run_with_balanced_books(
    tmp_path: Path, fault: str
) -> None:
    async def broken(context: RolloutContext) -> Any:
        groups = context.take(4)
        for group in groups[:3]:
            await context.answer(group)
        if fault == "raises":
            raise ValueError("mine")
        if fault == "nothing":
            return None
        if fault == "stranger":
            sample = make_sample(segments=[Segment.from_engine([5], [-1], 0)], reward=1.0)
            sample.status = Status.COMPLETED
            return [*groups[:3], Group(99, [sample])]
        return groups[:3] if fault == "short" else groups

    side = make_side(tmp_path, FakeEngines(4), hooks=LoadedHooks(rollout=broken))

    async def main() -> None:
        with pytest.raises(HookError, match="the rollout function"):
            await side.collect()
        side.check_books()
        assert side.ledger.state_of(3) is State.ISSUED

    run(main)


def test_tasks_that_a_rollout_function_leaves_running_are_ended(tmp_path: Path) -> None:
    engines = SlowRows({4})

    async def careless(context: RolloutContext) -> list[Group]:
        groups = context.take(5)
        task = asyncio.create_task(context.answer(groups[4]))
        await engines.wait_for_calls(2)
        await asyncio.gather(*(context.answer(group) for group in groups[:4]))
        assert not task.done()
        return groups[:4]

    side = make_side(tmp_path, engines, hooks=LoadedHooks(rollout=careless))

    async def main() -> None:
        batch = await side.train()
        assert len(batch.groups) == 4
        assert engines.num_running == 0
        side.check_books()

    run(main)
