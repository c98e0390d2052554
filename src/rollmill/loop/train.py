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
from rollmill.loop import state
from rollmill.loop.parts import Parts, open_parts
from rollmill.loop.run_dir import RunLock
from rollmill.rewards.alarm import OutcomeAlarm
from rollmill.rollout.batch import RolloutBatch
from rollmill.sample import flatten
from rollmill.sample_codec import encode_group
from rollmill.telemetry.console import RunView
from rollmill.telemetry.samples import SampleDump

logger = logging.getLogger(__name__)


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

    Raises:
        RollmillError: something cannot be used as configured, or broke beyond repair.
    """
    with RunLock(config.run.dir):
        async with open_parts(config, base_dir=base_dir, view=view) as parts:
            return await Loop(parts, stop or asyncio.Event()).run()


class Loop:
    """Synchronous training, one batch of rollouts per step."""

    def __init__(self, parts: Parts, stop: asyncio.Event) -> None:
        self._parts = parts
        self._config = parts.config
        self._stop = stop
        self._synced_version = -1
        self._saved_step = -1
        self._evaluated: dict[int, dict[str, float]] = {}
        self._clock: dict[str, float] = {}
        self._is_offloaded = False
        self._alarm = OutcomeAlarm()

    async def run(self) -> TrainResult:
        """From the newest checkpoint (or the start) to the last step, or until told to stop."""
        step = await self._resume()
        await self._weights_changed(step)
        if step == 0 and self._config.eval.at_start:
            await self._evaluate(step)
        while step < self._config.run.num_steps and not self._stop.is_set():
            step += 1
            await self._step(step)
            if self._is_due(step, self._config.eval.every):
                await self._evaluate(step)
            if self._is_due(step, self._config.run.save_every):
                await self._save(step)
        is_finished = step >= self._config.run.num_steps
        if is_finished and self._config.eval.at_end:
            await self._evaluate(step)
        await self._save(step)
        return TrainResult(step, is_finished, self._evaluated.get(step, {}))

    async def _step(self, step: int) -> None:
        self._clock = {}
        started = time.monotonic()
        batch = await self._rollout(step)
        metrics = await self._learn(step, batch)
        metrics |= await self._weights_changed(step)
        self._clock["time/step_s"] = time.monotonic() - started
        metrics |= batch.metrics | self._clock
        self._parts.records.write("train", step, metrics)
        self._parts.view.step_done(step, metrics)
        await self._parts.records.step_done(step)

    async def _rollout(self, step: int) -> RolloutBatch:
        with self._timed("rollout", step):
            batch = await self._parts.rollouts.collect(step=step, version=step - 1)
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
        await self._offload_engines()
        with self._timed("train", step):
            learned: dict[str, float] = await self._parts.trainer.call(
                "train",
                groups=[encode_group(group) for group in batch.groups],
                step=step,
                reward_key=self._config.reward.reward_key,
                max_new_tokens=self._config.rollout.sampling.max_new_tokens,
                temperature=self._config.rollout.sampling.temperature,
            )
        self._parts.rollouts.consumed(batch, step)
        if self._parts.records.dumps.is_on:
            reports = await self._parts.trainer.call("sample_reports")
            await asyncio.to_thread(self._parts.records.dumps.trained, step, reports)
        return {f"train/{name}": value for name, value in learned.items()}

    async def _sync(self, version: int) -> dict[str, float]:
        with self._timed("sync", version):
            if self._is_offloaded:
                await self._parts.engines.resume_memory(["weights"])
            metrics = await self._parts.transport.sync(
                self._parts.trainer, self._parts.engines, version
    async def _weights_changed(self, version: int) -> dict[str, float]:
        """Bring new weights to the engines; replayed answers leave that to the next evaluation."""
        return {} if self._config.rollout.is_replay else await self._sync(version)

            )
            if self._is_offloaded:
                await self._parts.engines.resume_memory(["kv_cache"])
                self._is_offloaded = False
        self._parts.rollouts.weights_changed(version)
        return metrics

    async def _offload_engines(self) -> None:
        """Free the engines' memory for the trainer, when they share it."""
        if self._config.engine.offload and not self._is_offloaded and self._config.needs_engines:
        self._synced_version = version
            await self._parts.engines.release_memory(["kv_cache", "weights"])
            self._is_offloaded = True

    async def _evaluate(self, step: int) -> None:
        if not self._config.eval.datasets or step in self._evaluated:
            return
        with self._timed("eval", step):
            result = await self._parts.evaluator.run(step)
        self._evaluated[step] = result.metrics
        spent = {"time/eval_s": self._clock["time/eval_s"]}
        self._parts.records.write("eval", step, result.metrics | spent)
        shown = []
        if self._synced_version != step:
            await self._sync(step)
        for name, groups in result.groups.items():
            samples = flatten(groups)
            shown += samples[: self._config.telemetry.num_printed_samples]
            await asyncio.to_thread(self._parts.records.dumps.evaluation, name, step, samples)
        is_edge = step in (0, self._config.run.num_steps)
        self._parts.view.eval_done(step, result.metrics, shown if is_edge else ())

    async def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        with self._timed("save", step):
            await state.save(
                self._parts.checkpoints,
                step,
                trainer=self._parts.trainer,
                rollouts=self._parts.rollouts,
            )
        self._saved_step = step

    async def _resume(self) -> int:
        self._parts.view.phase("looking for a checkpoint")
        step = await state.resume(
            self._parts.checkpoints,
            trainer=self._parts.trainer,
            rollouts=self._parts.rollouts,
            records=self._parts.records,
        )
        if step:
            self._saved_step = step
            self._parts.view.message(f"resumed after step {step} of {self._config.run.num_steps}")
        return step

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    @contextmanager
    def _timed(self, phase: str, step: int) -> Iterator[None]:
        """Show the phase and book its seconds as `time/PHASE_s`."""
        self._parts.view.phase(f"step {step}: {phase}")
        started = time.monotonic()
        try:
            with self._parts.records.timeline.span("loop", phase):
                yield
        finally:
            self._clock[f"time/{phase}_s"] = time.monotonic() - started


def outcomes_of(batch: RolloutBatch) -> list[str]:
    """How judging ended, for every judged sample of the batch."""
    return [s.reward_outcome for s in flatten(batch.groups) if s.reward_outcome is not None]
