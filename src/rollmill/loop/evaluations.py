"""Evaluations during training: in the loop, or beside it on engines of their own.

With engines set aside (`eval.num_engines`) an evaluation only waits until they have the weights;
it then goes on while training does, and the weights of its engines stay as they are until it has
ended. Otherwise training waits, and the engines that write training answers evaluate too: no
weights change meanwhile, so what is evaluated is one version either way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from rollmill.cluster.ranks import Worker
from rollmill.config import Config
from rollmill.engine.pool import EnginePool
from rollmill.loop.doctor import StallDoctor
from rollmill.loop.records import Records
from rollmill.loop.sync import sync_again
from rollmill.rollout.evaluate import Evaluator
from rollmill.rollout.tasks import end_all
from rollmill.sample import flatten
from rollmill.telemetry.console import RunView
from rollmill.telemetry.metrics_log import read_metrics
from rollmill.weights.base import Transport

logger = logging.getLogger(__name__)


class EnginesApart:
    """The engines that were set aside for evaluation.

    Args:
        pool: started.
        transport: of their own, so that training's next sync does not touch what they serve.
    """

    def __init__(self, pool: EnginePool, transport: Transport) -> None:
        self._pool = pool
        self._transport = transport

    async def bring(self, trainer: Worker, version: int) -> dict[str, float]:
        """Have them serve `version` of the trainer's weights."""
        return await sync_again(self._transport, trainer, self._pool, version)


class Evaluations:
    """Evaluates, writes down and shows.

    Args:
        config: the whole configuration.
        evaluator: the sets.
        records: where the figures go.
        view: the terminal view.
        doctor: watches over what these evaluations wait for.
        apart: engines set aside; None evaluates on training's.
    """

    def __init__(
        self,
        config: Config,
        *,
        evaluator: Evaluator,
        records: Records,
        view: RunView,
        doctor: StallDoctor,
        apart: EnginesApart | None,
    ) -> None:
        self._config = config
        self._evaluator = evaluator
        self._records = records
        self._view = view
        self._doctor = doctor
        self._apart = apart
        self._running: asyncio.Task[None] | None = None
        self._step = -1
        self.results: dict[int, dict[str, float]] = {}

    @property
    def are_apart(self) -> bool:
        """Whether training goes on meanwhile."""
        return self._apart is not None

    def remember(self, metrics: Path, at_most: int) -> None:
        """Take what an earlier process has evaluated up to a step as done."""
        names = [dataset.name for dataset in self._config.eval.datasets]
        for record in read_metrics(metrics) if metrics.is_file() else ():
            figures = {k: v for k, v in record.items() if k.startswith("eval/")}
            is_whole = all(any(k.startswith(f"eval/{name}/") for k in figures) for name in names)
            if record.get("kind") == "eval" and record["step"] <= at_most and is_whole:
                self.results[record["step"]] = figures

    def is_due(self, step: int) -> bool:
        """Whether there is something to evaluate at `step` that was not yet, nor is now."""
        is_begun = step in self.results or step == self._step
        return bool(self._config.eval.datasets) and not is_begun

    async def run(self, step: int, trainer: Worker) -> None:
        """Evaluate the weights of `step`; returns when training may go on.

        Raises:
            RollmillError: this evaluation failed, or one that went on beside training.
        """
        self._step = step
        if self._apart is None:
            await self._evaluate(step)
            return
        await self.finish()  # its engines cannot serve two versions
        await self._apart.bring(trainer, step)
        self._running = asyncio.create_task(self._evaluate(step), name=f"evaluation of step {step}")

    async def finish(self) -> None:
        """Wait for the evaluation that goes on beside training, if there is one."""
        if self._running is not None:
            running, self._running = self._running, None
            try:
                await running
            finally:
                await end_all([running])

    def check(self) -> None:
        """Raise what an evaluation beside training ended with."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()

    async def close(self) -> None:
        """End what still goes on; its figures are lost."""
        if self._running is not None:
            running, self._running = self._running, None
            await end_all([running])
            if not running.cancelled() and (error := running.exception()) is not None:
                logger.warning("an evaluation failed while the run ended: %s", error)

    async def _evaluate(self, step: int) -> None:
        started = time.monotonic()
        result = await self._doctor.watch(self._evaluator.run(step))
        self.results[step] = result.metrics
        spent = {"time/eval_s": time.monotonic() - started}
        self._records.write("eval", step, result.metrics | spent)
        shown = []
        for name, groups in result.groups.items():
            samples = flatten(groups)
            shown += samples[: self._config.telemetry.num_printed_samples]
            await asyncio.to_thread(self._records.dumps.evaluation, name, step, samples)
        is_edge = step in (0, self._config.run.num_steps)
        self._view.eval_done(step, result.metrics, shown if is_edge else ())
