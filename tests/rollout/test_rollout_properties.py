"""Random schedules against a scripted engine over a socket: what must hold whatever happens.

Lengths, faults, filters, fan-out, partial rollout, batch and over-sampling sizes are drawn; several
steps are collected and trained, with weights that change in between. The laws are those of the
module `rollmill.rollout.manager`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_script import Fault, LogNormal, Script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_helpers import LengthJudge, Side, make_side, run, scripted

from rollmill.errors import RolloutError
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.generate import GenerateContext, generate_single_turn
from rollmill.rollout.hooks import LoadedHooks
from rollmill.sample import Group, Sample, Status
from rollmill.telemetry.progress import Progress

NUM_STEPS = 4
FAULTS = [
    Fault("http", rate=0.1),
    Fault("cut", rate=0.1),
    Fault("malformed_json", rate=0.1),
    Fault("length_mismatch", rate=0.1),
    Fault("bad_spans", rate=0.1),
    Fault("empty_abort", rate=0.1),
    Fault("too_many_tokens", rate=0.1),
    Fault("unknown_finish", rate=0.1),
    Fault("stall", rate=0.1, after=2),
]


@dataclass(frozen=True)
class Schedule:
    seed: int
    batch_size: int
    extra: int
    n: int
    partial: bool
    masks: bool
    staleness: int
    is_filtered: bool
    is_ranked: bool
    rest: str
    keeps_failed: bool
    fans_out: bool
    faults: tuple[Fault, ...]
    max_requests: int
    token_s: float

    def config(self) -> dict[str, Any]:
        filters: dict[str, Any] = {"over_sampling_rest": self.rest}
        if self.is_filtered and self.n > 1:
            filters["dynamic"] = "nonzero_std"
        if self.is_ranked:
            filters["over_sampling"] = "by_reward_std"
        return {
            "batch_size": self.batch_size,
            "over_sampling_batch_size": self.batch_size + self.extra,
            "n_samples_per_prompt": self.n,
            "partial_rollout": self.partial,
            "mask_off_policy": self.masks,
            "max_staleness": self.staleness,
            "on_failed_group": "keep" if self.keeps_failed else "replace",
            "max_attempt_retries": 1,
            "max_failure_rate": 0.9,
            "abort_timeout_s": 0.5,
            "filters": filters,
        }


SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 10**6),
    batch_size=st.integers(1, 4),
    extra=st.integers(0, 4),
    n=st.integers(1, 3),
    partial=st.booleans(),
    masks=st.booleans(),
    staleness=st.integers(0, 2),
    is_filtered=st.booleans(),
    is_ranked=st.booleans(),
    rest=st.sampled_from(["reject", "ready"]),
    keeps_failed=st.booleans(),
    fans_out=st.booleans(),
    faults=st.lists(st.sampled_from(FAULTS), max_size=2).map(tuple),
    max_requests=st.sampled_from([1, 3, 32]),
    token_s=st.sampled_from([0.0, 0.0005]),
)


async def fan_out(sample: Sample, context: GenerateContext) -> list[Sample]:
    """Odd groups give two samples per attempt; those that come back are gone on with alone."""
    is_known = sample.segments or "sibling" in sample.metadata
    if is_known or sample.group_index % 2 == 0:
        return [await generate_single_turn(sample, context)]
    twin = context.sibling(sample)
    await asyncio.gather(context.extend(sample), context.extend(twin))
    return [sample, twin]


@dataclass
class Finished:
    """The versions of finished answers; none may be written again while it is young enough."""

    schedule: Schedule
    versions: dict[tuple[int, int], dict[int, int | None]] = field(default_factory=dict)
    thrown_away: list[tuple[int, int]] = field(default_factory=list)

    async def generate(self, sample: Sample, context: GenerateContext) -> list[Sample]:
        """The schedule's generate function, watched."""
        attempt = (sample.group_index, sample.attempt)
        is_sibling = "sibling" in sample.metadata
        if not sample.segments and not is_sibling:  # the attempt begins (again)
            before = self.versions.pop(attempt, {})
            if len(before) == self._num_siblings(sample):
                oldest = min((v for v in before.values() if v is not None), default=context.step)
                if oldest >= context.step - 1 - self.schedule.staleness:
                    self.thrown_away.append(attempt)
        written = await (fan_out if self.schedule.fans_out else alone)(sample, context)
        for answer in written:
            if answer.status.is_finished:
                self.versions.setdefault(attempt, {})[answer.index] = answer.oldest_version
        return written

    def _num_siblings(self, sample: Sample) -> int:
        return 1 + (self.schedule.fans_out and sample.group_index % 2)


async def alone(sample: Sample, context: GenerateContext) -> list[Sample]:
    """One answer per attempt."""
    return [await generate_single_turn(sample, context)]


def check_group(group: Group, schedule: Schedule, version: int) -> None:
    """What every trained group promises."""
    attempts = [siblings[0].attempt for siblings in group.attempts()]
    assert attempts == list(range(schedule.n))
    for sample in group.samples:
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert len(sample.weight_versions) == sample.response_length
        assert len(sample.tokens) == len(sample.prompt_tokens) + sample.response_length
        assert sample.response_length <= 24
        if sample.status is Status.FAILED:
            assert schedule.keeps_failed
            assert sample.failure
            assert not sample.in_loss
            continue
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert sample.reward is not None
        oldest = sample.oldest_version
        assert oldest is None or oldest >= version - schedule.staleness
    assert any(sample.status is not Status.FAILED for sample in group.samples)


def check_batch(batch: RolloutBatch, side: Side, schedule: Schedule, version: int) -> None:
    indices = [group.group_index for group in batch.groups]
    assert len(indices) == schedule.batch_size
    assert indices == sorted(set(indices))
    for group in batch.groups:
        check_group(group, schedule, version)
    figures = batch.metrics
    parts = ("in_flight", "accepted", "surplus", "rejected", "failed", "returned")
    assert figures["rollout/groups/in_flight"] == 0
    assert figures["rollout/groups/accepted"] == schedule.batch_size
    assert all(figures[f"rollout/groups/{part}"] >= 0 for part in parts)
    assert figures["rollout/max_requests_in_flight"] <= schedule.max_requests
    if schedule.partial:
        assert figures["rollout/wasted_tokens/aborted"] == 0


@settings(
    max_examples=int(os.environ.get("ROLLMILL_NUM_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(schedule=SCHEDULES)
def test_no_prompt_is_lost_or_trained_twice_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule
) -> None:
    folder: Path = tmp_path_factory.mktemp("run")
    script = Script(
        seed=schedule.seed,
        length=LogNormal(median=6, sigma=1.0, cap=30),
        token_s=schedule.token_s,
        faults=schedule.faults,
    )

    async def main() -> None:
        async with scripted(script, folder, max_retries=1, request_timeout_s=1.0) as (engine, pool):
            finished = Finished(schedule)
            side = make_side(
                folder,
                pool,
                config=schedule.config(),
                hooks=LoadedHooks(generate=finished.generate),
                judge=LengthJudge(),
                max_requests=schedule.max_requests,
                max_new_tokens=24,
            )
            balances: list[Progress] = side.progress
            for version in range(NUM_STEPS):
                await pool.update_weights(str(folder), version)
                try:
                    batch = await side.train(version)
                except RolloutError:  # so many faults that the batch cannot be filled
                    assert schedule.faults
                else:
                    check_batch(batch, side, schedule, version)
                assert not engine.running
                side.check_books()
            check_trained(side)
            assert not finished.thrown_away
            for progress in balances:
                assert progress.accepted <= schedule.batch_size + schedule.extra
            side.ledger.close()

    run(main)


def check_trained(side: Side) -> None:
    """Each issued group was trained at most once, and each sample index belongs to one sample."""
    counts = Counter(group.group_index for group in side.trained)
    assert max(counts.values(), default=0) <= 1
    samples = Counter(sample.index for group in side.trained for sample in group.samples)
    assert max(samples.values(), default=0) <= 1
    indices = [s.index for group in side.source._waiting.values() for s in group.samples]
    assert not set(indices) & set(samples)


@pytest.mark.parametrize("partial", [False, True])
def test_the_batch_does_not_depend_on_concurrency_when_nothing_is_over_sampled(
    tmp_path: Path, partial: bool
) -> None:
    script = Script(seed=3, length=LogNormal(median=6, sigma=1.0, cap=30), token_s=0.0005)

    async def tokens(max_requests: int) -> list[Any]:
        folder = tmp_path / str(max_requests)
        folder.mkdir()
        async with scripted(script, folder) as (_, pool):
            await pool.update_weights(str(folder), 0)
            side = make_side(
                folder, pool, max_requests=max_requests, config={"partial_rollout": partial}
            )
            for _ in range(3):
                await side.train(0)
            return [
                (s.group_index, s.attempt, s.index, s.tokens.tolist(), s.reward)
                for group in side.trained
                for s in group.samples
            ]

    async def main() -> None:
        assert await tokens(1) == await tokens(64)

    run(main)
