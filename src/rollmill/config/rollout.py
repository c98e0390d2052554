"""Generating one batch of answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollmill.config.base import Section
from rollmill.config.sampling import SamplingConfig


class FilterConfig(Section):
    """Which groups are worth training on."""

    dynamic: str | None = None
    """Judges each finished group: `nonzero_std`, or your `module:function`."""
    over_sampling: str | None = None
    """Ranks `over_sampling_batch_size` groups and keeps the first `batch_size`:
    `by_reward_std`, or your `module:function`."""
    over_sampling_rest: Literal["reject", "ready"] = "reject"
    """Groups ranked behind: rejected, or kept ready for the next step."""
    min_mean_reward: float | None = None
    """Reject groups whose mean reward is below this."""
    max_mean_reward: float | None = None
    """Reject groups whose mean reward is above this."""
    min_mean_length: int | None = Field(None, ge=0)
    """Reject groups whose answers have fewer response tokens than this on average."""
    max_mean_length: int | None = Field(None, ge=0)
    """Reject groups whose answers have more response tokens than this on average."""
    max_consecutive_rejections: int = Field(1000, ge=1)
    """Rejections in a row before the run stops and names the filter."""
    max_refills: int = Field(1000, ge=1)
    """Times that one batch may ask for prompts before the run stops and counts the reasons."""
    when_short: Literal["error", "keep"] = "error"
    """At those limits: stop with an error, or take rejected groups to fill the batch."""

    @property
    def is_selective(self) -> bool:
        """Whether any group may be turned down."""
        conditions = (
            self.dynamic, self.over_sampling, self.min_mean_reward, self.max_mean_reward,
            self.min_mean_length, self.max_mean_length,
        )  # fmt: skip
        return any(condition is not None for condition in conditions)

    @model_validator(mode="after")
    def _bounds(self) -> FilterConfig:
        for what in ("mean_reward", "mean_length"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"min_{what}: expected at most max_{what} ({high:g}), found {low:g} "
                    "(every group would be rejected)"
                )
        return self


class RolloutHooks(Section):
    """Your own functions, by `module:function` or `file.py:function`."""

    generate: str | None = None
    """Replaces the built-in generate of one sample."""
    sample: str | None = None
    """Runs on each sample between generation and reward."""
    sample_filter: str | None = None
    """Gets the batch's groups and sets `in_loss = False` on samples to keep out of the loss."""
    reward_post_process: str | None = None
    """Sees the batch's groups after rewards and may change the rewards."""
    all_samples: str | None = None
    """Sees the batch's groups and the rejected and failed ones, after rewards."""
    batch_converter: str | None = None
    """Turns the batch's groups into those that are trained on; the last word before the trainer."""
    log_rollout: str | None = None
    """Gets the batch and returns extra metrics."""
    buffer_policy: str | None = None
    """Chooses the order in which unfinished groups come back."""
    data_source: str | None = None
    """Makes the source of prompts instead of the `data` section."""
    rollout: str | None = None
    """Replaces the collecting of a batch: takes groups, has them answered, returns the batch."""
    evaluation: str | None = None
    """Replaces the evaluation: has the sets answered and returns the metrics."""
    log_eval: str | None = None
    """Gets an evaluation set's name and judged groups and returns extra metrics."""


class RolloutConfig(Section):
    """One batch: how many prompts, how many answers each, and what to do with the rest."""

    source: Literal["generate", "replay"] = "generate"
    """`generate`: engines write the answers. `replay`: the data holds them (SFT, offline
    distillation); engines are started for evaluation only."""
    batch_size: int = Field(8, ge=1)
    """Prompts (groups) per training step."""
    n_samples_per_prompt: int = Field(8, ge=1)
    """Answers per prompt. Group-relative estimators such as GRPO need at least 2."""
    over_sampling_batch_size: int | None = Field(None, ge=1)
    """Groups asked for at a time; more than batch_size keeps engines busy at the tail. Null is
    batch_size."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are chosen."""
    partial_rollout: bool = False
    """Keep the tokens of unfinished answers and go on with them next step. Off: they start afresh.
    Finished answers beside them are kept either way."""
    asynchronous: bool = False
    """Write the next answers while the trainer trains. No group is trained on that is more than
    max_staleness versions old; 0 gives the same batches as synchronous training."""
    max_staleness: int = Field(1, ge=0)
    """Answers of surplus and unfinished groups whose oldest token is more weight versions old than
    this are not trained on: they start afresh."""
    mask_off_policy: bool = False
    """Take tokens that are more than max_staleness versions old out of the loss instead."""
    max_attempt_retries: int = Field(2, ge=0)
    """Fresh tries of a failed sample before it is FAILED."""
    on_failed_group: Literal["replace", "keep"] = "replace"
    """A group with a FAILED sample: take another prompt instead, or keep the group with the
    failed samples out of the loss and the statistics."""
    max_failure_rate: float = Field(0.5, gt=0, le=1)
    """The run stops with the counted reasons when more than this share of the last 64 groups of a
    batch (at least 8) failed."""
    abort_timeout_s: float = Field(30.0, gt=0)
    """How long an abort may take before unanswered requests are given up."""
    deterministic: bool = True
    """Seed each sample from (run seed, group, attempt, segment): same run, same tokens on the
    embedded engine, whatever the concurrency."""
    filters: FilterConfig = FilterConfig()
    """Which groups are worth training on."""
    hooks: RolloutHooks = RolloutHooks()
    """Your own functions."""

    @property
    def is_replay(self) -> bool:
        """Whether answers are recorded in the data."""
        return self.source == "replay"

    @property
    def submit_size(self) -> int:
        """Groups asked for at a time."""
        return self.over_sampling_batch_size or self.batch_size

    @model_validator(mode="after")
    def _asynchronous(self) -> RolloutConfig:
        if not self.asynchronous:
            return self
        excluded = {
            "over_sampling_batch_size (max_staleness says how much is asked for)": (
                self.over_sampling_batch_size is not None
            ),
            "filters.over_sampling": self.filters.over_sampling is not None,
            "filters.when_short: keep": self.filters.when_short == "keep",
            "hooks.rollout": self.hooks.rollout is not None,
            "partial_rollout (no answer is ended for a batch)": self.partial_rollout,
        }
        for setting, is_set in excluded.items():
            if is_set:
                raise ValueError(f"asynchronous: does not go together with {setting}")
        return self

    @model_validator(mode="after")
    def _replay(self) -> RolloutConfig:
        if not self.is_replay:
            return self
        excluded = {
            "asynchronous": self.asynchronous,
            "partial_rollout": self.partial_rollout,
            "mask_off_policy": self.mask_off_policy,
            "over_sampling_batch_size": self.over_sampling_batch_size is not None,
            "filters.over_sampling": self.filters.over_sampling is not None,
            "filters.when_short: keep": self.filters.when_short == "keep",
            "hooks.rollout": self.hooks.rollout is not None,
            "hooks.buffer_policy": self.hooks.buffer_policy is not None,
        }
        for setting, is_set in excluded.items():
            if is_set:
                raise ValueError(
                    f"source: replay takes answers as the data has them, so it does not go "
                    f"together with {setting}"
                )
        return self

    @model_validator(mode="after")
    def _own_rollout(self) -> RolloutConfig:
        if self.hooks.rollout is None:
            return self
        excluded = {
            "filters (it chooses the groups)": self.filters.is_selective,
            "over_sampling_batch_size (it takes as many as it likes)": (
                self.over_sampling_batch_size is not None
            ),
        }
        for setting, is_set in excluded.items():
            if is_set:
                raise ValueError(f"hooks.rollout: does not go together with {setting}")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> RolloutConfig:
        if self.submit_size < self.batch_size:
            raise ValueError(
                f"over_sampling_batch_size: expected at least batch_size ({self.batch_size}), "
                f"found {self.over_sampling_batch_size}"
            )
        if self.filters.dynamic == "nonzero_std" and self.n_samples_per_prompt == 1:
            raise ValueError(
                "filters.dynamic: nonzero_std needs n_samples_per_prompt of 2 or more "
                "(one answer has no spread, so every group would be rejected)"
            )
        return self
