"""Settings that go with recorded answers, and those that would do nothing or harm."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.config.load import parse_config
from rollmill.errors import ConfigError


def values(*changes: str) -> dict[str, Any]:
    """A right SFT configuration, changed by `path=value`; an empty value removes the field."""
    whole: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"path": "talks.jsonl", "sft": {}},
        "rollout": {"source": "replay", "n_samples_per_prompt": 1},
        "trainer": {"algorithm": {"advantage": "none", "loss": "sft"}},
    }
    for change in changes:
        path, _, text = change.partition("=")
        *sections, field = path.split(".")
        node = whole
        for section in sections:
            node = node.setdefault(section, {})
        if text:
            node[field] = {"true": True, "false": False}.get(text, text)
        else:
            node.pop(field, None)
    return whole


def test_a_right_configuration_needs_no_engine_unless_something_is_evaluated() -> None:
    assert not parse_config(values()).needs_engines
    evaluated = values()
    evaluated["eval"] = {"datasets": [{"name": "held_out", "data": {"path": "e.jsonl"}}]}
    assert parse_config(evaluated).needs_engines


REFUSED = {
    "the default estimator": (
        ("trainer.algorithm.advantage=grpo",),
        "trainer.algorithm.advantage: expected none",
    ),
    "a policy loss": (("trainer.algorithm.loss=ppo_clip",), "trainer.algorithm.loss: expected sft"),
    "no answers": (("data.sft=",), "data.sft: expected where the answers are"),
    "several answers to a row": (
        ("rollout.n_samples_per_prompt=4",),
        "rollout.n_samples_per_prompt: expected 1",
    ),
    "answers and engines": (("rollout.source=generate",), "rollout.source: expected replay"),
    "another temperature": (
        ("rollout.sampling.temperature=0.7",),
        "rollout.sampling.temperature: expected 1",
    ),
    "engine log-probs": (
        ("trainer.algorithm.old_log_probs=rollout",),
        "trainer.algorithm.old_log_probs: expected recompute",
    ),
    "importance weights": (
        ("trainer.algorithm.importance_correction=mask",),
        "trainer.algorithm.importance_correction: expected none",
    ),
    "a divisor from sampling": (
        ("trainer.algorithm.aggregation=constant",),
        "trainer.algorithm.constant_length: expected a number",
    ),
    "asynchronous": (("rollout.asynchronous=true",), "does not go together with asynchronous"),
    "partial rollouts": (
        ("rollout.partial_rollout=true",),
        "does not go together with partial_rollout",
    ),
    "a limit of prompts": (("data.max_prompt_tokens=9",), "max_prompt_tokens: expected null"),
    "a generation prompt of one's own": (
        ("data.chat_template_kwargs.add_generation_prompt=true",),
        "found add_generation_prompt (rollmill gives it itself",
    ),
    "tools of one's own": (("data.chat_template_kwargs.tools=x",), "found tools (rollmill"),
    "a filter by rewards": (
        ("rollout.filters.max_mean_reward=0.9",),
        "rollout.filters.max_mean_reward: expected null (nobody judges recorded answers)",
    ),
    "conversations without a template": (
        ("data.apply_chat_template=false",),
        "conversations need apply_chat_template",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_does_not_go_with_recorded_answers_is_refused(case: str) -> None:
    changes, reason = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        parse_config(values(*changes))
    assert reason in str(caught.value)


def test_no_engines_are_set_aside_for_evaluation_where_all_of_them_evaluate() -> None:
    apart = values()
    apart["engine"] = {"num_engines": 2}
    apart["eval"] = {"datasets": [{"name": "a", "data": {"path": "e.jsonl"}}], "num_engines": 1}
    with pytest.raises(ConfigError, match=r"eval.num_engines: expected 0"):
        parse_config(apart)


def test_recorded_answers_are_never_evaluated() -> None:
    wrong = values()
    wrong["eval"] = {"datasets": [{"name": "a", "data": {"path": "e.jsonl", "sft": {}}}]}
    with pytest.raises(ConfigError, match="evaluation always generates"):
        parse_config(wrong)


def test_generated_answers_can_be_imitated_only_when_some_are_chosen() -> None:
    generated = ("data.sft=", "rollout.source=generate", "rollout.n_samples_per_prompt=4")
    with pytest.raises(ConfigError, match="learns every answer, whatever its reward"):
        parse_config(values(*generated))
    chosen = values(*generated, "rollout.hooks.sample_filter=best.py:only_right")
    assert parse_config(chosen).trainer.algorithm.loss == "sft"


def test_a_source_of_ones_own_may_hold_several_answers() -> None:
    own = (
        "data.sft=",
        "rollout.hooks.data_source=mine.py:source",
        "rollout.n_samples_per_prompt=4",
    )
    assert parse_config(values(*own)).attempts_per_batch == 32
