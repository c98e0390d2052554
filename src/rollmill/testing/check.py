"""The checks, one per kind of function. Each calls the function as a run does, and stricter."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.config.data import DatasetConfig
from rollmill.config.rollout import FilterConfig, RolloutHooks
from rollmill.data.source import DataSource
from rollmill.errors import HookError
from rollmill.filters import DynamicFilter, load_ranking
from rollmill.rewards.functions import CustomReward
from rollmill.rewards.inputs import RewardInput
from rollmill.rollout.batch_hooks import apply_batch_hooks
from rollmill.rollout.hooks import SIGNATURES, LoadedHooks, SourceContext, load_hooks, make_source
from rollmill.sample import Group, Status
from rollmill.testing.check_generate import check_generate_function
from rollmill.testing.check_whole import check_evaluation_function, check_rollout_function
from rollmill.testing.fakes import FakeTokenizer, make_batch, make_group, make_sample

TIME_LIMIT_S = 30.0
ALGORITHM = ("advantage", "loss", "aggregation", "importance_correction")
"""Fields of `trainer.algorithm` that may name a function."""


def check_hook(name: str, path: str, *, base_dir: Path | None = None) -> None:
    """Check the function `path` for its place `name`.

    Args:
        name: a field of `rollout.hooks`, or `reward`, `group_reward`, `dynamic_filter`,
            `over_sampling_filter`, or a field of `trainer.algorithm`: `advantage`, `loss`,
            `aggregation`, `importance_correction`.
        path: `module:function` or `file.py:function`.
        base_dir: folder that files are relative to; None is the current one.

    Raises:
        HookError: it cannot be loaded, or does not keep its contract.
    """
    folder = base_dir or Path.cwd()
    special: dict[str, Callable[[], None]] = {
        "generate": lambda: check_generate(path, base_dir=folder),
        "reward": lambda: check_reward(path, base_dir=folder),
        "group_reward": lambda: check_reward(path, base_dir=folder, per_group=True),
        "data_source": lambda: check_source(path, base_dir=folder),
        "sample": lambda: _check_sample_hook(path, folder),
        "rollout": lambda: _check_rollout(path, folder),
        "evaluation": lambda: _check_evaluation(path, folder),
        "dynamic_filter": lambda: _check_dynamic(path, folder),
        "over_sampling_filter": lambda: _check_ranking(path, folder),
        "buffer_policy": lambda: _check_policy(path, folder),
        "log_rollout": lambda: _check_log(name, path, folder, make_batch()),
        "log_eval": lambda: _check_log(name, path, folder, "held_out", make_batch()),
    }
    if name in special:
        special[name]()
    elif name in ("sample_filter", "reward_post_process", "all_samples", "batch_converter"):
        apply_batch_hooks(_loaded(name, path, folder), make_batch(), [make_group(9, (0.0, 0.0))])
    elif name in ALGORITHM:
        from rollmill.testing.check_algorithm import check_algorithm

        check_algorithm(name, path, base_dir=folder)
    else:
        raise HookError(
            "there is no such kind of function",
            where="check_hook",
            expected=", ".join(sorted({*special, *SIGNATURES, *ALGORITHM})),
            found=repr(name),
        )


def check_generate(path: str, *, base_dir: Path | None = None) -> None:
    """Check a generate function: alone, at once with others, cut off, aborted, and gone on with.

    Raises:
        HookError: it cannot be loaded, or does not keep its contract.
    """
    hooks = _loaded("generate", path, base_dir or Path.cwd())
    _run(check_generate_function(hooks.generate, where=path), where=path)


def check_reward(path: str, *, base_dir: Path | None = None, per_group: bool = False) -> None:
    """Check a reward function on answers of every kind, an empty one included.

    Raises:
        HookError: it cannot be loaded, raises, or gives something else than rewards.
    """
    function = CustomReward(path, base_dir or Path.cwd(), per_group=per_group)
    answers = [
        RewardInput("t1", response, label, {"id": 1}, status, response_length=3, index=index)
        for index, (response, label, status) in enumerate(
            [("t17", "t17", "completed"), ("", "t17", "completed"), ("t1 t2", None, "truncated")]
        )
    ]
    for inputs in [answers] if per_group else [[answer] for answer in answers]:
        found: str | None = None
        try:
            if function.is_async:
                _run(function.call_async(inputs), where=path)
            else:
                function.call(inputs)
        except HookError:
            raise
        except Exception as error:  # noqa: BLE001 - what user code raises is what we look for
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            raise HookError(
                "the reward function failed on an answer",
                where=path,
                expected="a finite number, a mapping of them, or None when no answer was found",
                found=f"{found} (for {inputs[0]!r})",
            )


def check_source(path: str, *, base_dir: Path | None = None) -> None:
    """Check a data source: exact numbers, unique indices, unfinished groups first, its position.

    Raises:
        HookError: it cannot be made, or does not keep its contract.
    """
    folder = base_dir or Path.cwd()
    hook = _loaded("data_source", path, folder).data_source
    assert hook is not None  # it was just loaded
    context = SourceContext(
        config=DatasetConfig(path="unused.jsonl"),
        tokenizer=FakeTokenizer(),
        n_samples_per_prompt=3,
        seed=0,
        context_length=512,
        base_dir=folder,
        buffer_policy=None,
    )
    source = make_source(hook, context)
    first = source.take(2 * max(1, len(source)) + 3)
    _expect(path, "take(n) gives n groups, whatever the size of the data", len(first),
            2 * max(1, len(source)) + 3)  # fmt: skip
    _check_groups(path, first)
    _check_position(path, source, make_source(hook, context), first)


def _check_groups(path: str, groups: list[Group]) -> None:
    indices = [sample.index for group in groups for sample in group.samples]
    _expect(path, "every sample has an index of its own", len(set(indices)), len(indices))
    numbers = [group.group_index for group in groups]
    _expect(path, "every group has an index of its own, ascending", numbers, sorted(set(numbers)))
    for group in groups:
        attempts = [sample.attempt for sample in group.samples]
        _expect(path, "a group has one sample per attempt", attempts, [0, 1, 2])
        states = {(s.status, s.group_index, len(s.segments)) for s in group.samples}
        _expect(path, "samples are fresh and know their group", states,
                {(Status.PENDING, group.group_index, 0)})  # fmt: skip


def _check_position(path: str, source: DataSource, other: DataSource, first: list[Group]) -> None:
    source.give_back([first[0]])
    saved = source.state_dict()
    expected = [group.group_index for group in source.take(3)]
    _expect(path, "unfinished groups come first", expected[0], first[0].group_index)
    other.load_state_dict(saved)
    found = [group.group_index for group in other.take(3)]
    _expect(path, "a loaded position goes on where it was saved", found, expected)


def _check_rollout(path: str, folder: Path) -> None:
    hooks = _loaded("rollout", path, folder)
    _run(check_rollout_function(hooks, where=path), where=path)


def _check_evaluation(path: str, folder: Path) -> None:
    function = _loaded("evaluation", path, folder).evaluation
    assert function is not None  # it was just loaded
    _run(check_evaluation_function(function), where=path)


def _check_sample_hook(path: str, folder: Path) -> None:
    hook: Any = _loaded("sample", path, folder).sample
    for sample in (make_group(0, (None, None)).samples[0], *make_group(1).samples):
        before = sample.response_tokens
        if sample.status is Status.FAILED:
            sample = make_sample(response="", status=Status.TRUNCATED)
            before = sample.response_tokens
        pending = hook(sample)
        if inspect.isawaitable(pending):
            _run(pending, where=path)
        same = np.array_equal(before, sample.response_tokens)
        _expect(path, "a sample hook leaves the tokens as they are", same, True)


def _check_dynamic(path: str, folder: Path) -> None:
    config = FilterConfig(dynamic=path)
    judge = DynamicFilter(config, reward_key=None, base_dir=folder)
    for group in (make_group(0), make_group(1, (1.0, 1.0)), make_group(2, (0.0, None))):
        judge(group)


def _check_ranking(path: str, folder: Path) -> None:
    ranking = load_ranking(path, reward_key=None, base_dir=folder)
    groups = make_batch(6)
    assert ranking is not None  # a path was given
    ranked = ranking(groups)
    _expect(path, "the ranking keeps enough groups for a batch of half the size",
            len(ranked) >= len(groups) // 2, True)  # fmt: skip


def _check_policy(path: str, folder: Path) -> None:
    policy = _loaded("buffer_policy", path, folder).buffer_policy
    assert policy is not None  # it was just loaded
    waiting = [make_group(i) for i in range(4)]
    for n in (0, 2, 4, 9):
        chosen = list(policy(list(waiting), n))
        _expect(path, f"at most {n} groups are chosen", len(chosen) <= n, True)
        ids = {id(group) for group in chosen}
        given = {id(group) for group in waiting}
        _expect(path, "each of the waiting groups is chosen at most once",
                len(ids) == len(chosen) and ids <= given, True)  # fmt: skip


def _check_log(name: str, path: str, folder: Path, *arguments: Any) -> None:
    figures = getattr(_loaded(name, path, folder), name)(*arguments)
    is_mapping = isinstance(figures, dict)
    values = figures.values() if is_mapping else ()
    numbers = all(isinstance(v, int | float | np.number) for v in values)
    _expect(path, "a log function returns a dict of numbers", is_mapping and numbers, True)


def _loaded(name: str, path: str, folder: Path) -> LoadedHooks:
    return load_hooks(RolloutHooks(**{name: path}), folder)


def _expect(path: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise HookError(
            f"a function does not keep its contract: {what}",
            where=path,
            expected=str(expected)[:300],
            found=str(found)[:300],
        )


def _run(work: Awaitable[Any], *, where: str) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(TIME_LIMIT_S):
            return await work

    try:
        return asyncio.run(limited())
    except TimeoutError:
        raise HookError(
            "a function did not come to an end", where=where, expected=f"{TIME_LIMIT_S:g} s"
        ) from None
