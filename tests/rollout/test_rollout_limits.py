"""Batches that cannot be filled: every way of asking ends, with the reasons counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import LengthJudge, make_side, run

from rollmill.data.ledger import State
from rollmill.errors import RolloutError
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rollout.teacher import ZeroReward
from rollmill.sample import Sample
from rollmill.testing import FakeEngines

WAYS: dict[str, dict[str, Any]] = {
    "batch by batch": {},
    "over-sampled": {"over_sampling_batch_size": 7},
    "partial": {"over_sampling_batch_size": 7, "partial_rollout": True},
    "ahead": {"asynchronous": True, "max_staleness": 2},
    "at once": {"asynchronous": True, "max_staleness": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_filter_that_rejects_every_group_ends_the_run_within_the_bound(
    tmp_path: Path, way: str
) -> None:
    filters = {"dynamic": "nonzero_std", "max_mean_length": 50, "max_consecutive_rejections": 20}
    teacher_only = ZeroReward(LengthJudge())  # a live distillation without a reward
    side = make_side(
        tmp_path, FakeEngines(4), judge=teacher_only, config={"filters": filters} | WAYS[way]
    )

    async def main() -> None:
        with pytest.raises(RolloutError) as caught:
            await side.train()
        told = str(caught.value)
        assert "max_mean_length, nonzero_std rejected 20 groups in a row" in told
        assert "20 × zero_std_0; accepted so far: 0" in told
        assert "461168" not in told  # the target of a stream is no number for people
        side.check_books()
        assert 20 <= side.ledger.balance()[State.REJECTED] < 20 + 3 * 7

    run(main)


@pytest.mark.parametrize("way", WAYS)
def test_rejections_with_a_group_kept_now_and_then_end_as_well(tmp_path: Path, way: str) -> None:
    judge = LengthJudge(lambda s: float(s.attempt) if s.group_index % 16 == 15 else 1.0)
    filters = {"dynamic": "nonzero_std", "max_refills": 5}
    side = make_side(tmp_path, FakeEngines(4), judge=judge, config={"filters": filters} | WAYS[way])

    async def main() -> None:
        with pytest.raises(RolloutError, match=r"did not fill the batch") as caught:
            await side.train()
        assert "rollout.filters.max_refills" in str(caught.value)
        assert "× zero_std_1; accepted so far: " in str(caught.value)
        side.check_books()

    run(main)


class BrokenJudge:
    """No answer can be judged."""

    async def judge(self, sample: Sample) -> Outcome:
        return Outcome(OutcomeKind.ERROR, detail="no judge")

    async def judge_group(self, samples: Any) -> list[Outcome]:
        return [await self.judge(sample) for sample in samples]


@pytest.mark.parametrize("way", [*WAYS, "kept"])
def test_groups_that_all_fail_end_the_run_though_any_rate_is_allowed(
    tmp_path: Path, way: str
) -> None:
    filters = {"max_refills": 5, "when_short": "keep" if way == "kept" else "error"}
    config = {"max_failure_rate": 1.0, "filters": filters} | WAYS.get(way, {})
    side = make_side(tmp_path, FakeEngines(4), judge=BrokenJudge(), config=config)

    async def main() -> None:
        with pytest.raises(RolloutError, match="did not fill the batch") as caught:
            await side.train()
        assert "× reward: no judge" in str(caught.value)
        side.check_books()

    run(main)
