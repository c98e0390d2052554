"""The judge: which reward a sample gets, and what its outcome does to the sample."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollmill.config.reward import RewardConfig
from rollmill.rewards.alarm import OutcomeAlarm
from rollmill.rewards.combine import combine
from rollmill.rewards.judge import Judge
from rollmill.rewards.outcome import Outcome, OutcomeKind, apply_outcome
from rollmill.sample import Sample, Segment, Status

FILE = "reward_functions.py"


def answer(response: str, label: Any = None, **fields: Any) -> Sample:
    return Sample([1, 2], response=response, label=label, **fields)


def judged(with_judge: Any, *samples: Sample, **config: Any) -> list[Outcome]:
    async def work(judge: Judge) -> list[Outcome]:
        return list(await asyncio.gather(*(judge.judge(sample) for sample in samples)))

    found: list[Outcome] = with_judge(work, **config)
    return found


def test_the_type_comes_from_the_sample_then_the_row_then_the_run(with_judge: Any) -> None:
    run = answer(r"\boxed{5}", "5")
    row = answer(r"Paris", "Paris", metadata={"reward_type": "f1"})
    own = answer("abc", "5", reward_function=f"{FILE}:length", metadata={"reward_type": "f1"})
    own_type = answer("Answer: 5", "5", reward_function="dapo")

    outcomes = judged(with_judge, run, row, own, own_type, type="math")

    assert [o.reward for o in outcomes] == [1.0, 1.0, 3.0, {"score": 1.0, "acc": 1.0}]


def test_a_row_cannot_name_a_function_or_an_unknown_type(with_judge: Any) -> None:
    rows = [
        answer("x", "x", metadata={"reward_type": name}) for name in (f"{FILE}:length", "maths", 3)
    ]

    outcomes = judged(with_judge, *rows, type="f1")

    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.ERROR}


def test_no_reward_at_all_is_an_error_not_a_crash(with_judge: Any) -> None:
    (outcome,) = judged(with_judge, answer("x", "x"))

    assert outcome.kind is OutcomeKind.ERROR
    assert "reward.type" in str(outcome.detail)


def test_judging_does_not_change_the_sample(with_judge: Any) -> None:
    sample = answer("the 5", "5")

    judged(with_judge, sample, type="f1")

    assert sample == answer("the 5", "5")


def test_a_function_sees_the_prompt_the_metadata_and_the_length(with_judge: Any) -> None:
    sample = answer(
        "5",
        "5",
        prompt="2+3?",
        metadata={"level": 1},
        status=Status.TRUNCATED,
        segments=[Segment.from_engine([1, 2, 3], [0.0, 0.0, 0.0], 0)],
    )

    (outcome,) = judged(with_judge, sample, function=f"{FILE}:describes")

    assert outcome.reward == {"label": 5.0, "length": 3.0}


def test_values_that_messages_cannot_hold_arrive(with_judge: Any) -> None:
    big = answer("x", 10**40, reward_function=f"{FILE}:big_label")
    odd = answer("\ud800 \\boxed{5}", {"set": {1, 2}}, metadata={"x": object(), 3: b"bytes"})

    outcomes = judged(with_judge, big, odd, type="random")

    assert outcomes[0].reward == 1.0
    assert outcomes[1].kind is OutcomeKind.VALUE


@pytest.mark.parametrize(
    ("name", "response", "kind", "told"),
    [
        ("nothing", "x", "invalid", ""),
        ("raises", "x", "error", "ValueError: no reward today"),
        ("not_a_number", "not a number", "error", "finite"),
        ("not_a_number", "text", "error", "finite"),
        ("not_a_number", "missing", "error", "KeyError"),
        ("no_such_function", "x", "error", "no function"),
    ],
)
def test_what_a_function_does_wrong_is_an_outcome(
    with_judge: Any, name: str, response: str, kind: str, told: str
) -> None:
    sample = answer(response, reward_function=f"{FILE}:{name}")

    (outcome,) = judged(with_judge, sample, type="random")

    assert outcome.kind == kind
    assert told in str(outcome.detail)


def test_a_group_function_sees_all_answers(with_judge: Any) -> None:
    group = [answer("a"), answer("ccc"), answer("bb")]

    outcomes = with_judge(
        lambda judge: judge.judge_group(group), function=f"{FILE}:ranks", per_group=True
    )

    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 0.0]


def test_samples_that_name_another_reward_are_judged_by_it_and_not_with_the_group(
    with_judge: Any,
) -> None:
    """`ranks` gives 1 to the longest answer that it sees."""
    group = [
        answer("a", reward_function=f"{FILE}:length"),
        answer("bb"),
        answer("Paris", "Paris", metadata={"reward_type": "f1"}),
        answer("c"),
    ]

    async def work(judge: Judge) -> tuple[list[Outcome], Outcome]:
        return await judge.judge_group(group), await judge.judge(group[2])

    outcomes, alone = with_judge(work, function=f"{FILE}:ranks", per_group=True)

    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 1.0, 0.0]
    assert alone.extracted == outcomes[2].extracted == "Paris"


def test_a_set_is_no_list_of_rewards(with_judge: Any) -> None:
    outcomes = with_judge(
        lambda judge: judge.judge_group([answer("a"), answer("bb")]),
        function=f"{FILE}:in_no_order",
        per_group=True,
    )

    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.ERROR}


def test_labels_and_metadata_of_numpy_and_with_any_keys_arrive(with_judge: Any) -> None:
    samples = [
        answer("x", np.float64(3.5), reward_function=f"{FILE}:label_as_number"),
        answer("x", 2, metadata={"n": np.float64(1)}, reward_function=f"{FILE}:label_as_number"),
        answer("x", 1, metadata={3: "three"}, reward_function=f"{FILE}:label_as_number"),
    ]

    outcomes = judged(with_judge, *samples, type="random")

    assert [outcome.reward for outcome in outcomes] == [3.5, 2.0, 1.0]


def test_a_label_that_cannot_be_sent_is_its_own_error(with_judge: Any) -> None:
    class Unspeakable:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    outcomes = judged(with_judge, answer("x", 1), answer("x", Unspeakable()), type="random")

    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.VALUE, OutcomeKind.ERROR]
    assert "no words" in str(outcomes[1].detail)


def test_a_weighted_sum_without_an_answer_is_not_better_than_a_wrong_one(with_judge: Any) -> None:
    wrong, missing = answer("Answer: 6", "5"), answer("I give up", "5")
    config = RewardConfig(weights={"dapo": 2.0})

    outcomes = judged(with_judge, wrong, missing, weights={"dapo": 2.0})
    for sample, outcome in zip((wrong, missing), outcomes, strict=True):
        apply_outcome(sample, outcome, config)

    assert outcomes[1].kind is OutcomeKind.INVALID
    assert wrong.reward == {"dapo": -1.0, "total": -2.0}
    assert missing.reward == -2.0


def test_a_group_function_that_returns_too_few_is_an_error_for_all(with_judge: Any) -> None:
    outcomes = with_judge(
        lambda judge: judge.judge_group([answer("a"), answer("b")]),
        function=f"{FILE}:wrong_length",
        per_group=True,
    )

    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.ERROR] * 2
    assert "expected 2 rewards, found 1" in str(outcomes[0].detail)


def test_without_per_group_a_group_is_judged_one_by_one(with_judge: Any) -> None:
    group = [answer("5", 5), answer("6", 5)]

    outcomes = with_judge(lambda judge: judge.judge_group(group), type="f1")

    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]


def test_a_weighted_sum_logs_its_parts(with_judge: Any) -> None:
    config = {"weights": {"math": 1.0, f"{FILE}:length": 0.01, f"{FILE}:parts": 2.0}}

    (outcome,) = judged(with_judge, answer("5", 5), **config)

    assert outcome.reward == {
        "math": 1.0,
        f"{FILE}:length": 1.0,
        f"{FILE}:parts": 1.0,
        "total": pytest.approx(3.01),
    }


def test_the_random_reward_is_seeded_by_run_and_sample(with_judge: Any) -> None:
    samples = [answer("x", index=k) for k in range(200)]

    first = [o.reward for o in judged(with_judge, *samples, type="random", num_workers=2)]
    again = [o.reward for o in judged(with_judge, *samples[::-1], type="random")]

    assert first == again[::-1]
    assert 60 < sum(reward == 1.0 for reward in first) < 140


VALUE = Outcome(OutcomeKind.VALUE, 0.5, "five", None)
INVALID, TIMEOUT = Outcome(OutcomeKind.INVALID), Outcome(OutcomeKind.TIMEOUT)
ERROR = Outcome.error("broken")


@pytest.mark.parametrize(
    ("outcome", "config", "reward"),
    [
        (VALUE, {}, 0.5),
        (INVALID, {}, 0.0),
        (INVALID, {"invalid_reward": -0.5}, -0.5),
        (TIMEOUT, {"timeout_reward": -2.0}, -2.0),
        (ERROR, {"error_reward": -3.0}, -3.0),
        (INVALID, {"type": "dapo"}, -1.0),
        (TIMEOUT, {"type": "boxed_dapo"}, -1.0),
        (INVALID, {"type": "dapo", "invalid_reward": 0.0}, 0.0),
    ],
)
def test_outcomes_become_numbers_as_configured(
    outcome: Outcome, config: dict[str, Any], reward: float
) -> None:
    sample = answer("x", status=Status.COMPLETED)

    apply_outcome(sample, outcome, RewardConfig(**config))

    assert sample.scalar_reward(RewardConfig(**config).reward_key) == reward
    assert sample.reward_outcome == outcome.kind
    assert sample.status is Status.COMPLETED


def test_a_row_of_type_dapo_gives_no_answer_its_worst_reward() -> None:
    sample = answer("x", metadata={"reward_type": "dapo"})

    apply_outcome(sample, INVALID, RewardConfig(type="math"))

    assert sample.reward == -1.0


def test_an_error_without_a_number_fails_the_sample_with_its_reason() -> None:
    sample = answer("x", status=Status.COMPLETED)

    apply_outcome(sample, ERROR, RewardConfig())

    assert sample.status is Status.FAILED
    assert sample.reward is None
    assert "broken" in str(sample.failure)


def test_a_mapping_keeps_its_parts_under_a_key_and_is_reduced_without_one() -> None:
    outcome = Outcome(OutcomeKind.VALUE, {"score": 1.0, "acc": 0.0})
    with_key, without, wrong = answer("x"), answer("x"), answer("x")

    apply_outcome(with_key, outcome, RewardConfig(reward_key="acc"))
    apply_outcome(without, outcome, RewardConfig())
    apply_outcome(wrong, outcome, RewardConfig(reward_key="nope"))

    assert with_key.scalar_reward("acc") == 0.0
    assert without.reward == 1.0
    assert without.metadata["reward_parts"] == {"score": 1.0, "acc": 0.0}
    assert wrong.status is Status.FAILED
    assert "nope" in str(wrong.failure)


def test_weights_of_parts_without_a_value_use_the_configured_numbers() -> None:
    config = RewardConfig(weights={"math": 1.0, "dapo": 0.5}, invalid_reward=-1.0)

    mixed = combine({"math": VALUE, "dapo": INVALID}, config)
    none = combine({"math": INVALID, "dapo": INVALID}, config)
    broken = combine({"math": VALUE, "dapo": ERROR}, config)

    assert mixed.reward == {"math": 0.5, "dapo": -1.0, "total": 0.0}
    assert none.kind is OutcomeKind.INVALID
    assert broken.kind is OutcomeKind.ERROR


@pytest.mark.parametrize(
    "config",
    [
        {"type": "math", "function": "a:b"},
        {"type": "math", "weights": {"f1": 1.0}},
        {"type": "math", "per_group": True},
        {"type": "math", "timeout_s": math.inf},
        {"type": "math", "error_reward": math.nan},
        {"weights": {"math": math.nan}},
        {"num_workers": 0},
        {"timeout_s": 0},
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig(**config)


def test_an_alarm_sounds_when_a_share_jumps_and_not_when_it_wavers() -> None:
    alarm = OutcomeAlarm()
    usual = ["value"] * 95 + ["invalid"] * 5

    assert alarm.update(["value"] * 100) == []
    assert [alarm.update(usual) for _ in range(5)] == [[]] * 5
    assert alarm.update(["value"] * 92 + ["invalid"] * 8) == []
    (sounded,) = alarm.update(["value"] * 60 + ["invalid"] * 40)

    assert sounded.kind is OutcomeKind.INVALID
    assert sounded.share == 0.4
    assert "40% of 100 answers ended as invalid" in str(sounded)


def test_an_alarm_does_not_sound_for_one_answer_of_a_small_batch() -> None:
    alarm = OutcomeAlarm()

    assert alarm.update(["value"] * 7 + ["timeout"]) == []
    assert alarm.update([]) == []
