"""Recorded answers go the way of generated ones: taken, filtered, booked, consumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmill.config import FilterConfig, RolloutConfig
from rollmill.data.ledger import Ledger, State
from rollmill.data.ledger_report import read_history
from rollmill.errors import HookError, RolloutError
from rollmill.filters import DynamicFilter
from rollmill.rollout.hooks import LoadedHooks
from rollmill.rollout.replay import ReplayManager, ReplayParts
from rollmill.sample import Group, Sample, Segment, Status, int_array

FILTER = """
def only_even(group):
    return group.group_index % 2 == 0, "odd"
"""


class Recorded:
    """A source of finished groups: any object with these methods can be replayed."""

    def __init__(self, num_answers: int = 1, change: Any = lambda group: None) -> None:
        self.next = 0
        self.num_answers = num_answers
        self.change = change

    def take(self, n: int) -> list[Group]:
        groups = [self._group(self.next + i) for i in range(n)]
        self.next += n
        return groups

    def _group(self, number: int) -> Group:
        samples = [
            Sample(
                int_array([1, 2]),
                index=number * self.num_answers + attempt,
                group_index=number,
                attempt=attempt,
                segments=[Segment.from_data([3, 4 + attempt])],
                status=Status.COMPLETED,
            )
            for attempt in range(self.num_answers)
        ]
        group = Group(number, samples)
        self.change(group)
        return group

    def give_back(self, groups: Sequence[Group]) -> None:
        raise AssertionError("nothing is unfinished")

    def new_index(self) -> int:
        raise AssertionError("nothing is generated")

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def __len__(self) -> int:
        return 3


def manager(
    folder: Path,
    source: Recorded,
    *,
    hooks: LoadedHooks | None = None,
    filters: FilterConfig | None = None,
    **fields: Any,
) -> ReplayManager:
    config = RolloutConfig(
        source="replay",
        **{"batch_size": 4, "n_samples_per_prompt": source.num_answers} | fields,
        filters=filters or FilterConfig(),
    )
    parts = ReplayParts(
        source=source,
        ledger=Ledger(folder / "ledger.sqlite"),
        dynamic_filter=DynamicFilter(config.filters, reward_key=None, base_dir=folder),
        hooks=hooks or LoadedHooks(),
        reward_key=None,
    )
    return ReplayManager(config, parts)


def run_steps(replay: ReplayManager, *steps: int) -> list[list[int]]:
    async def work() -> list[list[int]]:
        taken = []
        for step in steps:
            batch = await replay.collect(step=step, version=step - 1)
            replay.consumed(batch, step)
            taken.append([group.group_index for group in batch.groups])
        return taken

    return asyncio.run(work())


def test_batches_follow_each_other_and_the_books_show_every_group_consumed(tmp_path: Path) -> None:
    replay = manager(tmp_path, Recorded())
    assert run_steps(replay, 1, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    history = [event.state for event in read_history(tmp_path / "ledger.sqlite", 5)]
    assert history == [State.ISSUED, State.READY, State.CONSUMED]
    assert replay._parts.ledger.balance()[State.CONSUMED] == 8


def test_a_resume_takes_again_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    replay = manager(tmp_path, Recorded())
    run_steps(replay, 1)
    saved = replay.state_dict()
    run_steps(replay, 2, 3)
    again = manager(tmp_path, Recorded())
    again.load_state_dict(saved)
    assert run_steps(again, 2) == [[4, 5, 6, 7]]
    assert again._parts.ledger.balance()[State.CONSUMED] == 8


def test_a_run_without_a_checkpoint_forgets_what_a_killed_one_booked(tmp_path: Path) -> None:
    run_steps(manager(tmp_path, Recorded()), 1)
    again = manager(tmp_path, Recorded())
    again.forget_everything()
    assert run_steps(again, 1) == [[0, 1, 2, 3]]


def test_a_filter_rejects_recorded_groups_and_others_take_their_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILTER)
    filters = FilterConfig(dynamic="mine.py:only_even")
    replay = manager(tmp_path, Recorded(), filters=filters)
    assert run_steps(replay, 1) == [[0, 2, 4, 6]]
    balance = replay._parts.ledger.balance()
    assert (balance[State.CONSUMED], balance[State.REJECTED]) == (4, 3)


def test_answers_that_failed_in_the_data_are_replaced_and_too_many_stop_the_run(
    tmp_path: Path,
) -> None:
    def fail_the_second(group: Group) -> None:
        if group.group_index == 1:
            group.samples[0].fail("no answer was recorded")

    replay = manager(tmp_path / "a", Recorded(change=fail_the_second))
    assert run_steps(replay, 1) == [[0, 2, 3, 4]]
    all_failed = manager(tmp_path / "b", Recorded(change=lambda g: g.samples[0].fail("broken")))
    with pytest.raises(RolloutError, match="broken"):
        run_steps(all_failed, 1, 2, 3)


def test_a_failed_answer_among_several_can_be_kept_out_of_the_loss(tmp_path: Path) -> None:
    def fail_one(group: Group) -> None:
        group.samples[1].fail("cut off")

    replay = manager(tmp_path, Recorded(2, change=fail_one), on_failed_group="keep")
    batch = asyncio.run(replay.collect(step=1, version=0))
    assert [[s.in_loss for s in group.samples] for group in batch.groups] == [[True, False]] * 4


def test_the_sample_hook_sees_every_recorded_answer_and_its_errors_cost_the_sample(
    tmp_path: Path,
) -> None:
    async def hook(sample: Sample) -> None:
        if sample.group_index == 2:
            raise ValueError("not this one")
        sample.metadata["seen"] = True

    replay = manager(tmp_path, Recorded(), hooks=LoadedHooks(sample=hook))
    batch = asyncio.run(replay.collect(step=1, version=0))
    assert [group.group_index for group in batch.groups] == [0, 1, 3, 4]
    assert all(group.samples[0].metadata["seen"] for group in batch.groups)
    assert batch.failed[0][1] == "sample hook: ValueError: not this one"


def test_a_prompt_without_an_answer_is_refused(tmp_path: Path) -> None:
    def forget(group: Group) -> None:
        group.samples[0].restart()

    with pytest.raises(HookError, match="without its answer"):
        run_steps(manager(tmp_path, Recorded(change=forget)), 1)


def test_another_number_of_answers_than_configured_is_refused(tmp_path: Path) -> None:
    replay = manager(tmp_path, Recorded(2), n_samples_per_prompt=3)
    with pytest.raises(HookError, match=r"expected: +3 \(rollout.n_samples_per_prompt\)"):
        run_steps(replay, 1)


def test_answers_that_nobody_judged_have_no_reward_in_the_figures(tmp_path: Path) -> None:
    batch = asyncio.run(manager(tmp_path / "a", Recorded()).collect(step=1, version=0))
    assert not [name for name in batch.metrics if name.startswith("reward/mean")]
    assert batch.metrics["rollout/response_tokens"] == 8

    def judged(group: Group) -> None:
        group.samples[0].reward = float(group.group_index)

    batch = asyncio.run(manager(tmp_path / "b", Recorded(change=judged)).collect(step=1, version=0))
    assert batch.metrics["reward/mean"] == 1.5
