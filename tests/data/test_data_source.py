"""Taking groups, giving them back, and going on after a restart."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollmill.config import DatasetConfig
from rollmill.data import Dataset, PromptRow, PromptSource, open_source
from rollmill.data.loading import Part
from rollmill.errors import CheckpointError, HookError
from rollmill.sample import Segment, Status, int_array


def rows(*numbers, **more):
    return tuple(
        PromptRow(prompt=str(n), prompt_tokens=int_array([n, n]), label=n, row_id=f"r:{n}", **more)
        for n in numbers
    )


def source_of(num_rows=3, n_samples=2, *, parts=None, **options):
    dataset = Dataset(parts or (Part("all", rows(*range(num_rows))),))
    return PromptSource(dataset, n_samples_per_prompt=n_samples, **options)


def indices(groups):
    return [group.group_index for group in groups]


def labels(groups):
    return [group.samples[0].label for group in groups]


def test_eight_of_three_rows_is_eight():
    source = source_of(3)
    groups = source.take(8)
    assert len(groups) == 8
    assert len(source) == 3
    for epoch in (labels(groups)[:3], labels(groups)[3:6]):
        assert sorted(epoch) == [0, 1, 2]


def test_numbers_are_never_used_again():
    source = source_of(2, n_samples=3)
    groups = source.take(2) + source.take(3)
    assert indices(groups) == [0, 1, 2, 3, 4]
    samples = [sample for group in groups for sample in group.samples]
    assert [sample.index for sample in samples] == list(range(15))
    assert [sample.attempt for sample in samples] == [0, 1, 2] * 5
    assert [sample.group_index for sample in groups[4].samples] == [4, 4, 4]


def test_samples_of_a_group_share_arrays_and_images_but_not_metadata():
    part = Part("images", rows(1, metadata={"seen": []}, images=("pixels",)))
    first, second = source_of(parts=(part,)).take(1)[0].samples
    assert first.prompt_tokens is second.prompt_tokens
    assert first.multimodal_inputs["images"] is second.multimodal_inputs["images"]
    first.metadata["seen"].append(1)
    assert second.metadata == {"seen": []}
    assert part.rows[0].metadata == {"seen": []}


def test_text_only_rows_have_no_multimodal_inputs():
    mixed = rows(1) + rows(2, images=("pixels",))
    groups = source_of(parts=(Part("mixed", mixed),), shuffle=False).take(2)
    assert [group.samples[0].multimodal_inputs for group in groups] == [
        None,
        {"images": ("pixels",)},
    ]


def test_nothing_taken_is_nothing():
    source = source_of()
    assert source.take(0) == []
    with pytest.raises(ValueError):
        source.take(-1)


def test_groups_given_back_come_first_and_oldest_first():
    source = source_of()
    groups = source.take(4)
    groups[2].samples[0].segments.append(Segment.from_engine([5], [-0.5], 1))
    groups[2].samples[0].status = Status.ABORTED
    source.give_back([groups[2]])
    source.give_back([groups[0]])
    assert source.num_waiting == 2
    again = source.take(3)
    assert indices(again) == [0, 2, 4]
    assert again[1] is groups[2]
    assert source.num_waiting == 0


def test_giving_back_takes_all_or_nothing():
    source = source_of()
    first, second = source.take(2)
    source.give_back([first])
    for wrong in ([second, first], [second, second], [source_of().take(9)[8]]):
        with pytest.raises(ValueError):
            source.give_back(wrong)
    assert source.num_waiting == 1
    source.give_back([second])
    assert indices(source.take(2)) == [0, 1]


def test_the_buffer_policy_chooses_what_comes_back():
    def newest_but_one_at_a_time(waiting, n):
        return waiting[-1:]

    source = source_of(buffer_policy=newest_but_one_at_a_time)
    source.give_back(source.take(3))
    assert indices(source.take(2)) == [2, 3]
    assert indices(source.take(2)) == [1, 4]
    assert source.num_waiting == 1


@pytest.mark.parametrize(
    "policy",
    [
        lambda waiting, n: waiting,
        lambda waiting, n: [waiting[0]] * n,
        lambda waiting, n: source_of().take(1),
    ],
)
def test_a_policy_that_invents_groups_is_refused_and_nothing_is_lost(policy):
    source = source_of(buffer_policy=policy)
    source.give_back(source.take(3))
    with pytest.raises(HookError, match="buffer policy"):
        source.take(2)
    assert source.num_waiting == 3


def test_a_restart_goes_on_where_it_was():
    source = source_of(5, seed=7)
    groups = source.take(7)
    groups[3].samples[1].segments.append(Segment.from_engine([5, 6], [-0.5, -0.25], 3))
    source.give_back([groups[3], groups[1]])
    state = json.loads(json.dumps(source.state_dict()))

    resumed = source_of(5, seed=7)
    resumed.load_state_dict(state)
    assert resumed.num_waiting == 2
    here, there = source.take(9), resumed.take(9)
    assert indices(there) == indices(here) == [1, 3, *range(7, 14)]
    assert [g.samples for g in there] == [g.samples for g in here]
    np.testing.assert_array_equal(there[1].samples[1].response_tokens, [5, 6])


def test_changed_data_starts_a_new_epoch_with_numbers_going_on(caplog):
    source = source_of(3, shuffle=False)
    source.take(4)
    changed = source_of(4, shuffle=False)
    with caplog.at_level(logging.WARNING):
        changed.load_state_dict(source.state_dict())
    assert "changed" in caplog.text
    groups = changed.take(4)
    assert (indices(groups), labels(groups)) == ([4, 5, 6, 7], [0, 1, 2, 3])


def test_a_state_of_another_format_is_refused():
    with pytest.raises(CheckpointError):
        source_of().load_state_dict({"format": 99})


def test_parts_with_weights_are_mixed():
    parts = (Part("a", rows(*range(10)), 3.0), Part("b", rows(100, 101), 1.0))
    source = source_of(parts=parts)
    assert len(source) == 12
    taken = labels(source.take(40))
    assert sum(label >= 100 for label in taken) == 10


def test_open_source_puts_it_together(tokenizer, write_jsonl):
    path = Path(write_jsonl(*({"prompt": str(n), "label": n} for n in range(4))))
    source = open_source(
        DatasetConfig(path=path.name, shuffle=False),
        tokenizer=tokenizer,
        n_samples_per_prompt=2,
        seed=0,
        context_length=16,
        base_dir=path.parent,
        buffer_policy=lambda waiting, n: waiting[::-1][:n],
    )
    groups = source.take(5)
    assert labels(groups) == [0, 1, 2, 3, 0]
    source.give_back(groups[:2])
    assert indices(source.take(3)) == [1, 0, 5]


class Books(RuleBasedStateMachine):
    """Whatever happens, every group is out or waiting, never both, never lost, never twice."""

    def __init__(self):
        super().__init__()
        self.source = source_of(3)
        self.out = {}
        self.num_issued = 0

    @rule(n=st.integers(0, 5))
    def take(self, n):
        waiting_before = self.source.num_waiting
        groups = self.source.take(n)
        assert len(groups) == n
        fresh = [g for g in groups if g.group_index >= self.num_issued]
        assert len(fresh) == max(0, n - waiting_before)
        assert indices(groups) == sorted(indices(groups))
        assert not self.out.keys() & set(indices(groups))
        self.out |= {g.group_index: g for g in groups}
        self.num_issued += len(fresh)

    @rule(data=st.data())
    def give_back_some(self, data):
        if self.out:
            some = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True))
            self.source.give_back([self.out.pop(index) for index in some])

    @rule()
    def restart(self):
        state = json.loads(json.dumps(self.source.state_dict()))
        self.source = source_of(3)
        self.source.load_state_dict(state)

    @invariant()
    def the_books_balance(self):
        assert self.num_issued == len(self.out) + self.source.num_waiting


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
