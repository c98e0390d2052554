"""Checks of the configuration alone: combinations that are allowed and rarely meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollmill.checks.finding import Finding, ok, warning
from rollmill.config import Config
from rollmill.config.trainer import AlgorithmConfig
from rollmill.filters import DynamicFilter
from rollmill.loop.teachers import is_without_reward
from rollmill.sample import Group, Sample, Status, int_array

HIGH_LR = 5e-4
LOW_BF16_LR = 3e-6


def check_settings(config: Config) -> Iterator[Finding]:
    """All checks that need nothing but the configuration."""
    yield ok(
        "batch",
        f"{config.rollout.batch_size} prompts × {config.rollout.n_samples_per_prompt} answers = "
        f"{config.attempts_per_batch} per step, {_num_updates(config)} optimizer step(s)",
    )
    if not config.rollout.is_replay:
        yield from _sampling(config)
        yield from _precision(config)
    yield from _learning(config)
    yield from _staleness(config)
    yield from _filters(config)
    yield from _evaluation(config)
    yield from _reward(config)


def _num_updates(config: Config) -> int:
    return config.attempts_per_batch // (
        config.trainer.global_batch_size or config.attempts_per_batch
    )


def _sampling(config: Config) -> Iterator[Finding]:
    sampling = config.rollout.sampling
    if sampling.top_p < 1 or sampling.top_k not in (-1, 0) or sampling.min_p > 0:
        yield warning(
            "rollout.sampling",
            "top_p, top_k or min_p cut the distribution that answers are drawn from, while the "
            "log-probs are those of the whole one: the importance ratio is biased",
            "train with top_p 1, top_k -1, min_p 0; use them for evaluation only",
        )
    if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
        yield warning(
            "rollout.sampling",
            "penalties change the distribution in a way that the trainer does not know",
            "leave penalties at their defaults for training",
        )
    if not 0.5 <= sampling.temperature <= 1.5:
        yield warning(
            "rollout.sampling.temperature",
            f"{sampling.temperature:g} is far from 1",
            "answers too alike carry no signal, answers too wild none either; 1.0 is usual",
        )


def _learning(config: Config) -> Iterator[Finding]:
    lr = config.trainer.optimizer.lr
    if lr > HIGH_LR:
        yield warning(
            "trainer.optimizer.lr",
            f"{lr:g} is high for fine-tuning all weights",
            "1e-6 to 3e-5 is usual with RL, 5e-6 to 5e-5 with SFT; tiny models bear more",
        )
    warmup = config.trainer.optimizer.warmup_steps
    if warmup >= config.run.num_steps * _num_updates(config):
        yield warning(
            "trainer.optimizer.warmup_steps",
            f"warm-up takes all {config.run.num_steps} steps: the peak is never reached",
            "make warmup_steps smaller or run.num_steps larger",
        )


def _precision(config: Config) -> Iterator[Finding]:
    lr = config.trainer.optimizer.lr
    if config.engine.embedded.dtype == "bfloat16" and lr < LOW_BF16_LR:
        yield warning(
            "engine.embedded.dtype",
            f"bfloat16 engine weights hardly change in one step at lr {lr:g}: engines lag behind",
            "watch weights/changed_share, use a float32 engine, or importance_correction: truncate",
        )
    if (
        config.engine.embedded.dtype != config.trainer.dtype
        and config.trainer.algorithm.importance_correction == "none"
        and not config.engine.urls
    ):
        yield warning(
            "engine.embedded.dtype",
            f"the engine computes in {config.engine.embedded.dtype}, the trainer in "
            f"{config.trainer.dtype}: their log-probs differ",
            "use one precision, or trainer.algorithm.importance_correction: truncate",
        )


def _staleness(config: Config) -> Iterator[Finding]:
    is_ahead = config.rollout.asynchronous
    if config.rollout.mask_off_policy and is_ahead:
        yield warning(
            "rollout.mask_off_policy",
            "with asynchronous no batch holds a token older than max_staleness: there is nothing "
            "to mask",
            "leave it off",
        )
    if config.rollout.partial_rollout and config.rollout.submit_size == config.rollout.batch_size:
        yield warning(
            "rollout.partial_rollout",
            "with over_sampling_batch_size equal to batch_size nothing is ever unfinished",
            "set rollout.over_sampling_batch_size above batch_size, or leave partial_rollout off",
        )
    if config.rollout.mask_off_policy and config.rollout.max_staleness == 0 and not is_ahead:
        yield warning(
            "rollout.mask_off_policy",
            "with max_staleness 0 every token of an earlier step is masked",
            "raise rollout.max_staleness",
        )
    algorithm = config.trainer.algorithm
    is_stale = config.rollout.asynchronous and config.rollout.max_staleness > 0
    if is_stale and _is_uncorrected(algorithm):
        yield warning(
            "trainer.algorithm.importance_correction",
            "asynchronous answers are written by older weights, and nothing corrects for it: a "
            "step's ratio starts from the trainer's own log-probs, so it is 1 for the first update",
            "set importance_correction: truncate (or old_log_probs: rollout)",
        )


def _filters(config: Config) -> Iterator[Finding]:
    filters = config.rollout.filters
    if filters.over_sampling and config.rollout.submit_size == config.rollout.batch_size:
        yield warning(
            "rollout.filters.over_sampling",
            "with over_sampling_batch_size equal to batch_size there is nothing to choose from",
            "set rollout.over_sampling_batch_size above batch_size",
        )
    if is_without_reward(config) and (reason := _verdict_on_zeros(config)) is not None:
        yield warning(
            "rollout.filters",
            f"the teacher is the only signal, so every reward is 0, and every group is rejected "
            f"({reason}); rows with a metadata.reward_type are judged and may pass",
            "leave rollout.filters out, or set a reward",
        )


def _verdict_on_zeros(config: Config) -> str | None:
    """Why the filter turns down a group whose rewards are all 0; None when it keeps it or is the
    user's own."""
    filters = config.rollout.filters
    if filters.dynamic is not None and ":" in filters.dynamic:
        return None
    judge = DynamicFilter(
        filters.model_copy(update={"min_mean_length": None, "max_mean_length": None}),
        reward_key=None,
        base_dir=Path(),
    )
    samples = [
        Sample(int_array([0]), attempt=attempt, status=Status.COMPLETED, reward=0.0)
        for attempt in range(config.rollout.n_samples_per_prompt)
    ]
    return judge(Group(0, samples)).reason


def _is_uncorrected(algorithm: AlgorithmConfig) -> bool:
    return algorithm.importance_correction == "none" and algorithm.old_log_probs == "recompute"


def _evaluation(config: Config) -> Iterator[Finding]:
    names = [dataset.name for dataset in config.eval.datasets]
    if not names:
        yield warning(
            "eval.datasets",
            "there is no evaluation: figures of the training data alone do not show overfitting "
            "or hacking",
            "add a held-out set",
        )
    for dataset in config.eval.datasets:
        is_greedy = dataset.sampling is None or dataset.sampling.temperature == 0
        if is_greedy and dataset.n_samples_per_prompt > 1:
            yield warning(
                f"eval.datasets.{dataset.name}",
                f"{dataset.n_samples_per_prompt} answers per prompt at temperature 0 are all the "
                "same: pass@k is pass@1",
                "set its sampling.temperature above 0, or n_samples_per_prompt: 1",
            )
    if names and config.eval.every > config.run.num_steps:
        yield warning(
            "eval.every",
            f"no evaluation falls into {config.run.num_steps} steps except at the ends",
            "make eval.every smaller",
        )


def _reward(config: Config) -> Iterator[Finding]:
    reward = config.reward
    if reward.timeout_s > 60:
        yield warning(
            "reward.timeout_s",
            f"one hung answer holds a worker for {reward.timeout_s:g} s",
            "a few seconds are enough for rules; more workers for slow judges",
        )
    if config.run.save_every == 0 and config.run.num_steps > 50:
        yield warning(
            "run.save_every",
            f"nothing is saved before step {config.run.num_steps}: a crash loses everything",
            "save every 10 to 50 steps",
        )
