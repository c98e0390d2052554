"""The judge: what the rollout asks for rewards.

It decides which reward a sample gets (the sample's own, its row's, or the run's), has it graded,
in a worker process or (`remote`) over HTTP, and gives back an outcome. It never changes a sample:
see `apply_outcome`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rollmill.config.reward import RewardConfig
from rollmill.errors import RewardError
from rollmill.rewards.combine import combine
from rollmill.rewards.functions import is_function_path
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.outcome import Outcome, apply_outcome
from rollmill.rewards.pool import WorkerPool
from rollmill.rewards.protocol import Setup, Task
from rollmill.rewards.registry import (
    REMOTE,
    base_type,
    check_names,
    is_type,
    reward_names,
    unknown_type,
)
from rollmill.sample import Sample

__all__ = ["Judge", "apply_outcome"]


class _Remote(Protocol):
    async def judge(self, item: RewardInput, *, is_boxed: bool) -> Outcome: ...
    async def close(self) -> None: ...


class Judge:
    """Judges samples as `config` says. Use as an async context manager, or `start` and `close`.

    Args:
        config: the reward section.
        seed: the run's seed, for the `random` reward.
        base_dir: folder of the configuration file; function files are looked up there.
    """

    def __init__(self, config: RewardConfig, *, seed: int, base_dir: Path) -> None:
        self._config = config
        self._pool: WorkerPool | None = None
        self._remote: _Remote | None = None
        self._is_started = False
        self._starting = asyncio.Lock()
        self._setup = Setup(
            config=config.model_dump_json(),
            base_dir=str(base_dir.resolve()),
            seed=seed,
            graders=tuple(n for n in reward_names(config) if base_type(n) != REMOTE),
        )

    async def start(self) -> None:
        """Start the workers and load the rewards, the user's functions included.

        Raises:
            RollmillError: a reward does not exist, or cannot be loaded (HookError).
        """
        check_names(self._config)
        names = reward_names(self._config)
        if any(base_type(name) == REMOTE for name in names):
            self._remote_client()
        self._is_started = True
        if self._setup.graders or not names:
            await self._started_pool()

    async def _started_pool(self) -> WorkerPool:
        """The pool; a run that is judged by a server alone starts none until a row needs it."""
        if not self._is_started:
            raise RewardError("the judge is not running", fix="use `async with Judge(…)`")
        async with self._starting:
            if self._pool is None:
                pool = WorkerPool(self._setup, self._config.num_workers)
                await pool.start()
                self._pool = pool
        return self._pool

    async def close(self) -> None:
        """Stop the workers. Calls that still wait get a RewardError."""
        self._is_started = False
        if self._pool is not None:
            await self._pool.close()
        if self._remote is not None:
            await self._remote.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def judge(self, sample: Sample) -> Outcome:
        """The outcome for one sample. May be cancelled at any moment.

        Raises:
            RewardError: the judge was closed, or its workers cannot be started any more.
        """
        return await self.judge_input(RewardInput.from_sample(sample), sample.reward_function)

    async def judge_input(self, item: RewardInput, reward: str | None = None) -> Outcome:
        """The outcome for one answer; `reward` overrides the row's and the run's."""
        override = reward if reward is not None else item.metadata.get("reward_type")
        if override is None and self._config.weights:
            names = list(self._config.weights)
            parts = await asyncio.gather(*(self._judge_part(name, item) for name in names))
            return combine(dict(zip(names, parts, strict=True)), self._config)
        name = override if override is not None else self._config.type or self._config.function
        if not isinstance(name, str):
            return Outcome.error(
                "no reward for this sample: expected reward.type, reward.function or "
                f"metadata.reward_type, found {name!r}"
            )
        if reward is None and override is not None and not is_type(name):
            return Outcome.error(f"metadata.reward_type: {unknown_type(name).what}")
        if override is None and self._config.per_group:
            return (await self._submit(Task(name, [item], grouped=True)))[0]
        return await self._judge_part(name, item)

    async def judge_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes for all answers to a prompt, in their order.

        With `per_group` the function sees them in one call, but those whose sample or row names
        another reward; otherwise each is judged by itself.
        """
        function = self._config.function if self._config.per_group else None
        together = [] if function is None else [s for s in samples if _named_reward(s) is None]
        if function is None or not together:
            return list(await asyncio.gather(*(self.judge(sample) for sample in samples)))
        inputs = [RewardInput.from_sample(sample) for sample in together]
        grouped, *others = await asyncio.gather(
            self._submit(Task(function, inputs, grouped=True)),
            *(self._judge_named(sample) for sample in samples if _named_reward(sample) is not None),
        )
        queues = iter(grouped), itertools.chain.from_iterable(others)
        return [next(queues[_named_reward(sample) is not None]) for sample in samples]

    async def _judge_named(self, sample: Sample) -> list[Outcome]:
        return [await self.judge(sample)]

    def worker_process_ids(self) -> list[int]:
        """Ids of the running worker processes, for telemetry."""
        return [] if self._pool is None else self._pool.process_ids()

    async def _judge_part(self, name: str, item: RewardInput) -> Outcome:
        if not is_function_path(name) and not is_type(name):
            return Outcome.error(unknown_type(name).what)
        if base_type(name) == REMOTE:
            return await self._remote_client().judge(item, is_boxed=name != REMOTE)
        return (await self._submit(Task(name, [item])))[0]

    async def _submit(self, task: Task) -> list[Outcome]:
        pool = self._pool if self._pool is not None else await self._started_pool()
        return await pool.submit(task)

    def _remote_client(self) -> _Remote:
        if self._remote is None:
            from rollmill.rewards.remote import RemoteReward

            self._remote = RemoteReward(self._config)
        return self._remote


def _named_reward(sample: Sample) -> object:
    """The reward that a sample or its row asks for; None when the run's applies."""
    return sample.reward_function or sample.metadata.get("reward_type")
