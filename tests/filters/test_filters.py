"""Filters: reasons, float noise, failed samples, fan-out, rewards with parts, hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.rollout import FilterConfig, RolloutConfig
from rollmill.errors import ConfigError, HookError
from rollmill.filters import KEEP, DynamicFilter, Verdict, load_ranking
from rollmill.filters.dynamic import nonzero_std
from rollmill.sample import Group
from rollmill.testing import make_group


def judge(group: Group, key: str | None = None, **config: object) -> Verdict:
    settings = FilterConfig.model_validate(config)
    return DynamicFilter(settings, reward_key=key, base_dir=Path())(group)


def with_fan_out(group: Group) -> Group:
    """The first attempt gives three samples."""
    twins = [make_group(group.group_index, (0.0,)).samples[0] for _ in range(2)]
    for number, twin in enumerate(twins):
        twin.index, twin.reward = 900 + number, group.samples[0].reward
    return Group(group.group_index, [*group.samples, *twins])


def test_groups_without_spread_are_rejected_and_the_reason_says_which() -> None:
    assert judge(make_group(0, (1.0, 1.0)), dynamic="nonzero_std") == Verdict(False, "zero_std_1")
    assert judge(make_group(0, (0.0, 0.0)), dynamic="nonzero_std") == Verdict(False, "zero_std_0")
    assert judge(make_group(0, (0.0, 1.0)), dynamic="nonzero_std") == KEEP


@given(reward=st.floats(-10, 10), n=st.integers(1, 64))
def test_equal_rewards_have_no_spread_whatever_their_rounding(reward: float, n: int) -> None:
    assert not nonzero_std([reward] * n).keep
    assert not nonzero_std([0.1] * 8).keep  # float32 would find a spread of 8e-9 here


def test_one_answer_per_prompt_with_a_spread_filter_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ValueError, match="n_samples_per_prompt of 2 or more"):
        RolloutConfig(n_samples_per_prompt=1, filters=FilterConfig(dynamic="nonzero_std"))


def test_failed_samples_are_left_out_and_a_group_of_them_is_rejected() -> None:
    assert not judge(make_group(0, (1.0, None, 1.0)), dynamic="nonzero_std").keep
    assert judge(make_group(0, (1.0, None, 0.0)), dynamic="nonzero_std").keep
    assert judge(make_group(0, (None, None))) == Verdict(False, "all_failed")


def test_bounds_on_the_mean_count_each_attempt_once() -> None:
    group = with_fan_out(make_group(0, (1.0, 0.0)))  # by samples the mean would be 0.75
    assert judge(group, max_mean_reward=0.6) == KEEP
    assert judge(group, max_mean_reward=0.4) == Verdict(False, "mean_reward_high")
    assert judge(group, min_mean_reward=0.6) == Verdict(False, "mean_reward_low")


def test_a_part_of_the_reward_is_what_counts() -> None:
    group = make_group(0, (1.0, 1.0))
    for number, sample in enumerate(group.samples):
        sample.reward = {"right": 1.0, "style": float(number)}
    assert judge(group, key="style", dynamic="nonzero_std").keep
    assert not judge(group, key="right", dynamic="nonzero_std").keep


def test_an_unknown_filter_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nonzero_std, or module:function"):
        judge(make_group(), dynamic="nonzero")
    with pytest.raises(ConfigError, match="by_reward_std, or module:function"):
        load_ranking("by_std", reward_key=None, base_dir=tmp_path)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("True", KEEP),
        ("False", Verdict(False, "mine")),
        ("(False, 'too easy')", Verdict(False, "too easy")),
        ("(True, 'whatever')", KEEP),
    ],
)
def test_a_filter_of_ones_own(tmp_path: Path, body: str, expected: Verdict) -> None:
    (tmp_path / "own.py").write_text(f"def mine(group):\n    return {body}\n")
    config = FilterConfig(dynamic="own.py:mine")
    assert DynamicFilter(config, reward_key=None, base_dir=tmp_path)(make_group()) == expected


def test_ranking_is_by_spread_descending_stable_and_counts_attempts_once() -> None:
    ranking = load_ranking("by_reward_std", reward_key=None, base_dir=Path())
    assert ranking is not None
    groups = [
        make_group(0, (0.5, 0.5)),
        make_group(1, (0.0, 1.0)),
        with_fan_out(make_group(2, (0.0, 1.0))),
        make_group(3, (None, None)),
        make_group(4, (0.0, 0.5, None)),
    ]
    assert [group.group_index for group in ranking(groups)] == [1, 2, 4, 0, 3]


def test_a_ranking_of_ones_own_may_not_make_groups_up(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def mine(groups):\n    return [groups[0]] * 2\n")
    ranking = load_ranking("own.py:mine", reward_key=None, base_dir=tmp_path)
    assert ranking is not None
    with pytest.raises(HookError, match="not given, or one twice"):
        ranking([make_group(0), make_group(1)])


def test_bounds_on_the_length_count_all_tokens_of_an_attempt() -> None:
    group = with_fan_out(make_group(0, (1.0, 0.0), length=6))
    for twin in group.samples[2:]:  # 0 tokens each: the first attempt has 6, the second 6
        twin.segments = []
    assert judge(group, max_mean_length=6, min_mean_length=6) == KEEP
    assert judge(group, max_mean_length=5) == Verdict(False, "mean_length_high")
    assert judge(group, min_mean_length=7) == Verdict(False, "mean_length_low")
    group.samples[2].segments = group.samples[0].segments  # by samples the mean would be 4.5
    assert judge(group, min_mean_length=9, max_mean_length=9) == KEEP


def test_every_condition_that_is_set_is_named() -> None:
    def name(**config: object) -> str:
        settings = FilterConfig.model_validate(config)
        return DynamicFilter(settings, reward_key=None, base_dir=Path()).name

    assert name(dynamic="nonzero_std", max_mean_reward=0.5) == "max_mean_reward, nonzero_std"
    assert name(min_mean_length=3) == "min_mean_length"
    assert name() == "(none)"


@pytest.mark.parametrize("what", ["mean_reward", "mean_length"])
def test_bounds_that_no_group_can_meet_are_a_mistake_in_the_configuration(what: str) -> None:
    with pytest.raises(ValueError, match=f"min_{what}: expected at most max_{what}"):
        FilterConfig.model_validate({f"min_{what}": 2, f"max_{what}": 1})


def test_reasons_are_few_whatever_the_rewards() -> None:
    """They are names of metrics: one for each reward there is would be thousands."""
    reasons = {nonzero_std([number / 9999] * 4).reason for number in range(10_000)}
    assert len(reasons) <= 1 + 9 * 4 + 1
