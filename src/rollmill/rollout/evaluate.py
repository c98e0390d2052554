"""Evaluation: held-out prompts, answered and judged, each set by its own rules.

All sets run at once and share one gate (their own share of the engines, apart from training). A
failed answer is counted as failed; it neither ends the evaluation nor passes for a wrong answer.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from rollmill.config import Config, EvalDatasetConfig, RewardConfig, SamplingConfig
from rollmill.data import PromptRow, load_rows
from rollmill.data.template import Tokenizer
from rollmill.errors import DataError, HookError, RollmillError
from rollmill.rewards.judge import Judge
from rollmill.rollout.batch_hooks import extra_metrics
from rollmill.rollout.gate import Gate
from rollmill.rollout.generate import Engines, GenerateContext
from rollmill.rollout.group import GroupRunner, first_line
from rollmill.rollout.hooks import LoadedHooks, generate_overrides, load_generate
from rollmill.rollout.pass_at_k import mean_pass_at_k
from rollmill.sample import Group, Sample, Status


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation gave.

    Attributes:
        metrics: `eval/NAME/…` figures.
        groups: the judged answers of each set, in data set order.
    """

    metrics: dict[str, float]
    groups: dict[str, list[Group]]


@dataclass(frozen=True)
class EvaluationContext:
    """What an evaluation function works with.

    Attributes:
        step: training steps that the evaluated weights have had.
        sets: names of the configured sets.
        answer: answers and judges every prompt of a set; its groups in data set order.
        metrics: the built-in figures (`eval/NAME/…`) of a set's groups.
    """

    step: int
    sets: tuple[str, ...]
    answer: Callable[[str], Awaitable[list[Group]]]
    metrics: Callable[[str, list[Group]], dict[str, float]]


class EvaluationFunction(Protocol):
    """The evaluation hook."""

    async def __call__(self, context: EvaluationContext) -> dict[str, float]:
        """The evaluation's metrics, by full name (`eval/…`)."""


@dataclass(frozen=True)
class _EvalSet:
    config: EvalDatasetConfig
    rows: Sequence[PromptRow]
    runner: GroupRunner
    judge: Judge
    reward_key: str | None


class Evaluator:
    """Evaluates the policy on the configured sets. Use as an async context manager.

    Args:
        config: the whole configuration.
        engines: the engine pool.
        tokenizer: the model's tokenizer.
        context_length: most tokens of prompt and response together.
        hooks: the run's functions; sets without a generate function of their own use its.
        base_dir: folder of the configuration file.

    Raises:
        DataError: a set's data cannot be used.
        HookError: a set's generate function cannot be used.
    """

    def __init__(
        self,
        config: Config,
        *,
        engines: Engines,
        tokenizer: Tokenizer,
        context_length: int,
        hooks: LoadedHooks,
        base_dir: Path,
    ) -> None:
        limit = config.eval.max_concurrent_requests or config.engine.max_concurrent_requests
        self._gate = Gate(limit)
        self._limit = limit
        self._hooks = hooks
        self._stack = AsyncExitStack()
        context = GenerateContext(
            engines=engines,
            gate=self._gate,
            tokenizer=tokenizer,
            sampling=config.rollout.sampling,
            context_length=context_length,
            seed=config.run.seed if config.rollout.deterministic else None,
            step=0,
            scope="eval",
            new_index=itertools.count(1 << 40).__next__,
        )
        self._sets = [
            _open_set(config, dataset, context, tokenizer, hooks, base_dir)
            for dataset in config.eval.datasets
        ]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:  # closes the first judges when a later one fails
            for each in self._sets:
                await opening.enter_async_context(each.judge)
            self._stack = opening.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def num_answers(self) -> int:
        """Answers that one evaluation generates."""
        return sum(len(s.rows) * s.config.n_samples_per_prompt for s in self._sets)

    async def run(self, step: int, on_answer: Callable[[int], None] = lambda _: None) -> EvalResult:
        """Answer and judge every prompt of every set.

        Args:
            step: training steps that the served weights have had.
            on_answer: told how many more answers are done, for live views.

        Raises:
            HookError: the evaluation function raised or returned no metrics.
        """
        by_name: dict[str, list[Group]] = {}

        async def answer(name: str) -> list[Group]:
            by_name[name] = await self._run_set(self._set(name), step, on_answer)
            return by_name[name]

        names = tuple(each.config.name for each in self._sets)
        context = EvaluationContext(step, names, answer, self._metrics)
        own = self._hooks.evaluation
        metrics = await (evaluate_all(context) if own is None else evaluate_with(own, context))
        return EvalResult(metrics, by_name)

    def _set(self, name: str) -> _EvalSet:
        for each in self._sets:
            if each.config.name == name:
                return each
        raise HookError(
            "there is no such evaluation set",
            where="rollout.hooks.evaluation",
            expected=", ".join(each.config.name for each in self._sets),
            found=name,
            fix="use one of the names in context.sets",
        )

    def _metrics(self, name: str, groups: list[Group]) -> dict[str, float]:
        each = self._set(name)
        figures = eval_metrics(each.config, groups, each.reward_key)
        where = "rollout.hooks.log_eval"
        extra = extra_metrics(self._hooks.log_eval, name, groups, where)
        return figures | {f"eval/{name}/{key}": value for key, value in extra.items()}

    async def _run_set(
        self, each: _EvalSet, step: int, on_answer: Callable[[int], None]
    ) -> list[Group]:
        """The set's groups in order; only about as many at once as the gate lets through."""
        runner = replace(each.runner, context=replace(each.runner.context, step=step))
        n = each.config.n_samples_per_prompt
        places = asyncio.Semaphore(2 * self._limit // n + 1)  # some are being judged

        async def answer(number: int) -> Group:
            async with places:
                group = await runner.run(_eval_group(each.rows[number], number, n))
                on_answer(n)
                return group

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(answer(i)) for i in range(len(each.rows))]
        return [task.result() for task in running]


async def evaluate_all(context: EvaluationContext) -> dict[str, float]:
    """The built-in evaluation function: all sets at once, the built-in figures of each."""
    async with asyncio.TaskGroup() as tasks:
        running = {name: tasks.create_task(_answer(context, name)) for name in context.sets}
    metrics: dict[str, float] = {}
    for name, task in running.items():
        metrics |= context.metrics(name, task.result())
    return metrics


async def _answer(context: EvaluationContext, name: str) -> list[Group]:
    return await context.answer(name)


async def evaluate_with(own: EvaluationFunction, context: EvaluationContext) -> dict[str, float]:
    """The metrics of a user's evaluation function.

    Raises:
        HookError: it raised, or returned something else than metrics.
    """
    try:
        metrics = await own(context)
    except (RollmillError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise _bad_evaluation(first_line(error)) from error
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _bad_evaluation(first_line(error)) from error


def _bad_evaluation(found: str) -> HookError:
    return HookError(
        "the evaluation function failed",
        where="rollout.hooks.evaluation",
        expected="a mapping from metric names to numbers",
        found=found,
    )


def eval_metrics(
    config: EvalDatasetConfig, groups: Sequence[Group], reward_key: str | None
) -> dict[str, float]:
    """Mean reward, pass@k, lengths, truncation and failures of one set.

    `reward` is the mean over judged answers, absent when there is none; `failed` counts the
    others. pass@k is given for every
    power of two up to n, from the judged answers of each prompt.
    """
    samples = [sample for group in groups for sample in group.samples]
    counts, rewards = [], []
    for group in groups:
        values = [
            float(np.mean([s.scalar_reward(reward_key) for s in siblings]))
            for siblings in group.attempts()
            if all(s.status is not Status.FAILED and s.reward is not None for s in siblings)
        ]
        rewards += values
        counts.append((len(values), sum(v >= config.pass_threshold for v in values)))
    lengths = [s.response_length for s in samples]
    figures = {
        "response_length": float(np.mean(lengths)) if lengths else 0.0,
        "truncated": _share(samples, Status.TRUNCATED),
        "failed": float(sum(s.status is Status.FAILED for s in samples)),
        "num_answers": float(len(samples)),
    }
    if rewards:
        figures["reward"] = float(np.mean(rewards))
    k = 1
    while k <= config.n_samples_per_prompt:
        if (value := mean_pass_at_k(counts, k)) is not None:
            figures[f"pass@{k}"] = value
        k *= 2
    return {f"eval/{config.name}/{name}": value for name, value in figures.items()}


def _share(samples: Sequence[Sample], status: Status) -> float:
    return sum(s.status is status for s in samples) / len(samples) if samples else 0.0


def _open_set(
    config: Config,
    dataset: EvalDatasetConfig,
    context: GenerateContext,
    tokenizer: Tokenizer,
    hooks: LoadedHooks,
    base_dir: Path,
) -> _EvalSet:
    reward: RewardConfig = dataset.reward or config.reward
    judge = Judge(reward, seed=config.run.seed, base_dir=base_dir)
    try:
        rows = load_rows(
            dataset.data,
            tokenizer=tokenizer,
            context_length=context.context_length,
            base_dir=base_dir,
            seed=config.run.seed,
        )
    except DataError as error:
        place = f"evaluation set {dataset.name}: {error.where}"
        raise DataError(error.what, **dict(error.parts()) | {"where": place}) from error
    runner = GroupRunner(
        generate=load_generate(
            dataset.generate,
            base_dir=base_dir,
            name=f"eval.datasets.{dataset.name}.generate",
            default=hooks.generate,
        ),
        overrides=generate_overrides(base_dir),
        context=replace(
            context,
            sampling=dataset.sampling or _greedy(config.rollout.sampling),
            scope=f"eval/{dataset.name}",
        ),
        judge=judge,
        reward=reward,
        max_retries=config.rollout.max_attempt_retries,
        sample_hook=hooks.sample,
    )
    return _EvalSet(dataset, rows, runner, judge, reward.reward_key)


def _greedy(sampling: SamplingConfig) -> SamplingConfig:
    return sampling.model_copy(update={"temperature": 0.0})


def _eval_group(row: PromptRow, number: int, n: int) -> Group:
    samples = [
        Sample(
            prompt_tokens=row.prompt_tokens,
            index=number * n + attempt,
            group_index=number,
            attempt=attempt,
            prompt=row.prompt,
            label=row.label,
            metadata=copy.deepcopy(row.metadata),
            multimodal_inputs={"images": row.images} if row.images else None,
        )
        for attempt in range(n)
    ]
    return Group(number, samples)
