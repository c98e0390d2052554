"""Learning from recorded answers: where they are in a row, and which settings go with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.base import Section

if TYPE_CHECKING:
    from rollmill.config.root import Config


class SftConfig(Section):
    """Rows that hold answers: conversations, or prompts with a response."""

    messages_key: str = "messages"
    """Field with the conversation: chat messages, the assistant's among them. A message's own
    `step_loss_mask: 0` takes that turn out of the loss."""
    response_key: str | None = None
    """Field with the response to the prompt in `data.prompt_key`, for rows without `messages`."""
    turns: Literal["all", "last", "each"] = "all"
    """Assistant turns to learn. `all`: every one, in one sample. `last`: the last one only. `each`:
    a sample per turn, without what follows it: for templates that change earlier turns, such as
    those that remove thinking."""
    max_tokens: int | None = Field(None, ge=2)
    """Most tokens of a sample; null allows the context limit."""
    too_long: Literal["stop", "skip", "truncate"] = "stop"
    """Longer samples: end start-up with the row, leave them out, or cut their end off. The last
    two are counted."""


def check_answers(config: Config) -> None:
    """Raise ValueError when recorded answers, the `sft` loss and the other sections disagree."""
    if config.rollout.is_replay:
        _check_replay(config)
    elif config.data.sft is not None:
        raise ValueError(
            "rollout.source: expected replay with data.sft (the rows hold the answers), found "
            "generate"
        )
    if config.trainer.algorithm.loss == "sft":
        _check_sft_loss(config)


def _check_replay(config: Config) -> None:
    algorithm, is_distillation = config.trainer.algorithm, config.opd.mode == "offline"
    if is_distillation and config.data.sft is not None:
        raise ValueError(
            "data.sft: expected null with opd.mode: offline (the answers to learn are those of "
            "opd.data), found a section"
        )
    has_source = config.rollout.hooks.data_source is not None
    if config.data.sft is None and not has_source and not is_distillation:
        raise ValueError(
            "data.sft: expected where the answers are in a row (data.sft: {} for rows with "
            "`messages`) with rollout.source: replay, found null"
        )
    if config.data.sft is not None and not has_source and config.rollout.n_samples_per_prompt > 1:
        raise ValueError(
            "rollout.n_samples_per_prompt: expected 1 with data.sft (a row holds one answer), "
            f"found {config.rollout.n_samples_per_prompt}"
        )
    if is_distillation or (config.data.sft is not None and not has_source):
        _check_no_reward_filters(config)
    if config.eval.num_engines:
        raise ValueError(
            "eval.num_engines: expected 0 with rollout.source: replay (no engine writes training "
            f"answers, so all of them evaluate), found {config.eval.num_engines}"
        )
    if algorithm.aggregation == "constant" and algorithm.constant_length is None:
        raise ValueError(
            "trainer.algorithm.constant_length: expected a number of tokens with rollout.source: "
            "replay (nothing is sampled, so no limit of sampling can stand for it), found null"
        )
    if is_distillation:
        return
    if algorithm.advantage != "none" and ":" not in algorithm.advantage:
        raise ValueError(
            "trainer.algorithm.advantage: expected none with rollout.source: replay (nobody judges "
            f"recorded answers), found {algorithm.advantage}"
        )
    if algorithm.advantage == "none" and algorithm.loss != "sft" and ":" not in algorithm.loss:
        raise ValueError(
            "trainer.algorithm.loss: expected sft with rollout.source: replay (without advantages "
            f"nothing is learned), found {algorithm.loss}"
        )


def _check_no_reward_filters(config: Config) -> None:
    """Raise ValueError for a filter that looks at rewards, where no answer has one."""
    filters = config.rollout.filters
    looks = {
        "dynamic": filters.dynamic == "nonzero_std",
        "min_mean_reward": filters.min_mean_reward is not None,
        "max_mean_reward": filters.max_mean_reward is not None,
    }
    for name, is_looking in looks.items():
        if is_looking:
            raise ValueError(
                f"rollout.filters.{name}: expected null (nobody judges recorded answers), found "
                f"{getattr(filters, name)}"
            )


def _check_sft_loss(config: Config) -> None:
    algorithm, rollout = config.trainer.algorithm, config.rollout
    unused = {
        "advantage: expected none (the loss does not look at advantages)": (
            algorithm.advantage != "none" and rollout.is_replay
        ),
        "old_log_probs: expected recompute": algorithm.old_log_probs != "recompute",
        "importance_correction: expected none": algorithm.importance_correction != "none",
        "off_policy_mask_delta: expected null": algorithm.off_policy_mask_delta is not None,
    }
    for problem, is_set in unused.items():
        if is_set:
            name = problem.partition(":")[0]
            raise ValueError(
                f"trainer.algorithm.{problem} with loss: sft, found {getattr(algorithm, name)}"
            )
    if rollout.is_replay and rollout.sampling.temperature != 1:
        raise ValueError(
            "rollout.sampling.temperature: expected 1 with loss: sft (the trainer divides logits "
            f"by it), found {rollout.sampling.temperature:g}"
        )
    if not rollout.is_replay and not _is_selective(config):
        raise ValueError(
            "trainer.algorithm.loss: sft learns every answer, whatever its reward. Expected "
            "recorded answers (rollout.source: replay), or a choice among generated ones "
            "(rollout.filters or rollout.hooks.sample_filter), found neither"
        )


def _is_selective(config: Config) -> bool:
    hooks = config.rollout.hooks
    chosen = (hooks.sample_filter, hooks.batch_converter, hooks.rollout)
    return config.rollout.filters.is_selective or any(each is not None for each in chosen)
