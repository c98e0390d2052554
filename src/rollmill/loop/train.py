"""The training loop: the order of the steps and nothing else.

Weights carry a version: the number of training steps they have had. Step k is written by weights of
version k - 1, so a run of n steps ends with version n, and a resume after step k syncs version k.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollmill.config import Config
from rollmill.errors import WorkerGone
from rollmill.loop.parts import Parts, open_parts
from rollmill.loop.run_dir import RunLock
from rollmill.rewards.alarm import OutcomeAlarm
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.collector import BatchNotFilled
from rollmill.sample import flatten
from rollmill.sample_codec import encode_group
from rollmill.telemetry.console import RunView

logger = logging.getLogger(__name__)

ENGINE_EVENTS = {
    "deaths": "num_engine_deaths",
    "redispatched_requests": "num_redispatched",
    "kept_tokens": "num_kept_tokens",
}
"""Metrics of a step, and the counters of the pool that they are taken from."""


@dataclass
class TrainResult:
    """How a run ended.

    Attributes:
        step: steps done, all together.
        is_finished: False when it was asked to stop before its last step.
        metrics: the last evaluation's figures.
    """

    step: int
    is_finished: bool
    metrics: dict[str, float] = field(default_factory=dict)


async def train(
    config: Config, *, base_dir: Path, view: RunView, stop: asyncio.Event | None = None
) -> TrainResult:
    """Run (or go on with) the training that `config` describes.

    Args:
        config: the whole configuration.
        base_dir: folder of the configuration file; relative data and hook files are found there.
        view: the terminal view.
        stop: when set, the run saves after the step in progress and stops.

    When the trainer's process dies, all parts are started again and the run goes on from its newest
    checkpoint, as a new process would, at most `run.max_restarts` times without a new step.

    Raises:
        RollmillError: something cannot be used as configured, or broke beyond repair.
    """
    stop = stop or asyncio.Event()
    num_restarts = furthest = 0
    with RunLock(config.run.dir):
        while True:
            loop = None
            try:
                async with open_parts(config, base_dir=base_dir, view=view) as parts:
                    loop = Loop(parts, stop)
                    return await loop.run()
            except WorkerGone as error:
                if loop is None:  # it did not even start
                    raise
                num_restarts = 0 if loop.step > furthest else num_restarts
                furthest = max(furthest, loop.step)
                if num_restarts >= config.run.max_restarts:
                    raise
                num_restarts += 1
                logger.warning("going on from the newest checkpoint: %s", error)
                view.message(f"{error.what}: going on from the newest checkpoint")


class Loop:
    """One batch of rollouts per step: synchronous, ahead of the trainer, or recorded.

    Attributes:
        step: the last step that is done.
    """

    def __init__(self, parts: Parts, stop: asyncio.Event) -> None:
        self.step = 0
        self._parts = parts
        self._config = parts.config
        self._stop = stop
        self._clock: dict[str, float] = {}
        self._alarm = OutcomeAlarm()
        self._events = parts.engines.stats()

    async def run(self) -> TrainResult:
        """From the newest checkpoint (or the start) to the last step, or until told to stop."""
        await self._resume()
        await self._weights_changed(self.step)
        every = self._config.eval.every
        if self._is_due(self.step, every) if self.step else self._config.eval.at_start:
            await self._evaluate(self.step)  # a resume may come before an evaluation had ended
        while self.step < self._config.run.num_steps and not self._stop.is_set():
            await self._step(self.step + 1)
            self.step += 1
            if self._is_due(self.step, self._config.run.save_every):
                await self._save(self.step, is_last=False)
            if self._is_due(self.step, every):
                await self._evaluate(self.step)
        is_finished = self.step >= self._config.run.num_steps
        if is_finished and self._config.eval.at_end:
            await self._evaluate(self.step)
        await self._save(self.step, is_last=True)
        await self._parts.evaluations.finish()
        results = self._parts.evaluations.results
        return TrainResult(self.step, is_finished, results.get(self.step, {}))

    async def _step(self, step: int) -> None:
        self._clock = {}
        started = time.monotonic()
        self._parts.faults.step_began(step)
        self._parts.evaluations.check()
        batch = await self._rollout(step)
        metrics = await self._learn(step, batch)
        metrics |= await self._weights_changed(step)
        metrics |= self._engine_events()
        self._clock["time/step_s"] = time.monotonic() - started
        metrics |= batch.metrics | self._clock | self._parts.constant_metrics
        self._parts.records.write("train", step, metrics)
        self._parts.view.step_done(step, metrics)
        await self._parts.records.step_done(step)

    async def _rollout(self, step: int) -> RolloutBatch:
        with self._timed("rollout", step):
            try:
                batch = await self._parts.doctor.watch(
                    self._parts.rollouts.collect(step=step, version=step - 1)
                )
            except BatchNotFilled as error:  # its reasons are in these answers
                self._parts.records.dumps.turned_down(
                    step, rejected=error.rejected, failed=error.failed
                )
                raise
        batch.metrics["rollout/stalls"] = float(self._parts.doctor.num_stalls)
        for alarm in self._alarm.update(outcomes_of(batch)):
            logger.warning("step %d: %s", step, alarm)
        await asyncio.to_thread(
            self._parts.records.dumps.rollouts,
            step,
            batch.groups,
            rejected=batch.rejected,
            failed=batch.failed,
        )
        return batch

    async def _learn(self, step: int, batch: RolloutBatch) -> dict[str, float]:
        await self._parts.sync.make_room_for_trainer()
        with self._timed("train", step):
            work = self._parts.trainer.call(
                "train",
                groups=[encode_group(group) for group in batch.groups],
                step=step,
                reward_key=self._config.reward.reward_key,
                max_new_tokens=self._config.rollout.sampling.max_new_tokens,
                temperature=self._config.training_temperature,
            )
            learned: dict[str, float] = await self._parts.doctor.mind(
                f"the trainer's part of step {step} (see logs/trainer.log)", work
            )
        self._parts.rollouts.consumed(batch, step)
        if self._parts.records.dumps.is_on:
            reports = await self._parts.trainer.call("sample_reports")
            await asyncio.to_thread(self._parts.records.dumps.trained, step, reports)
        return {f"train/{name}": value for name, value in learned.items()}

    async def _weights_changed(self, version: int) -> dict[str, float]:
        """Bring new weights to the engines; replayed answers leave that to the next evaluation."""
        return {} if self._config.rollout.is_replay else await self._sync(version)

    def _engine_events(self) -> dict[str, float]:
        """What befell the engines since the step before; nothing where none are used."""
        before, self._events = self._events, self._parts.engines.stats()
        if self._config.rollout.is_replay:
            return {}
        return {
            f"engine/{name}": float(getattr(self._events, field) - getattr(before, field))
            for name, field in ENGINE_EVENTS.items()
        }

    async def _sync(self, version: int) -> dict[str, float]:
        with self._timed("sync", version):
            work = self._parts.sync.bring(version)
            metrics = await self._parts.doctor.mind(f"the sync of weights {version}", work)
        self._parts.rollouts.weights_changed(version)
        return metrics

    async def _evaluate(self, step: int) -> None:
        """Evaluate once; a run that was told to stop leaves that to the one that goes on."""
        if not self._parts.evaluations.is_due(step):
            return
        if self._stop.is_set() and step < self._config.run.num_steps:
            return
        if not self._parts.evaluations.are_apart and self._parts.sync.version != step:
            await self._sync(step)
        with self._shown("eval", step):
            await self._parts.evaluations.run(step, self._parts.trainer)

    async def _save(self, step: int, *, is_last: bool) -> None:
        with self._shown("save", step):
            await self._parts.checkpoints.save(step, is_last=is_last)

    async def _resume(self) -> None:
        self._parts.view.phase("looking for a checkpoint")
        self.step = step = await self._parts.checkpoints.resume()
        self._parts.run_dir.write_down(self._config, self._parts.tokenizer)  # now that they fit
        if step:
            self._parts.view.message(f"resumed after step {step} of {self._config.run.num_steps}")
        self._parts.evaluations.remember(self._parts.run_dir.metrics, at_most=step)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    @contextmanager
    def _shown(self, phase: str, step: int) -> Iterator[None]:
        """Show the phase, in the terminal and in the timeline."""
        self._parts.view.phase(f"step {step}: {phase}")
        with self._parts.records.timeline.span("loop", phase):
            yield

    @contextmanager
    def _timed(self, phase: str, step: int) -> Iterator[None]:
        """Show a phase of the step and book its seconds as `time/PHASE_s` of the step's record."""
        started = time.monotonic()
        try:
            with self._shown(phase, step):
                yield
        finally:
            self._clock[f"time/{phase}_s"] = time.monotonic() - started


def outcomes_of(batch: RolloutBatch) -> list[str]:
    """How judging ended, for every judged sample of the batch."""
    return [s.reward_outcome for s in flatten(batch.groups) if s.reward_outcome is not None]
