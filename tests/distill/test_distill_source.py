"""Recorded answers as a data source: every group once an epoch, and a position that can be kept."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from distill_helpers import ANSWERS, NUM_PROMPTS, World, open_answers

from rollmill.distill.manifest import read_manifest, write_manifest
from rollmill.errors import CheckpointError
from rollmill.sample import Group, flatten
from rollmill.sample_codec import encode_group


def prompts_of(groups: list[Group]) -> list[tuple[int, ...]]:
    return [tuple(group.samples[0].prompt_tokens.tolist()) for group in groups]


def test_every_group_comes_once_an_epoch_in_another_order(world: World, prepared: Path) -> None:
    source = open_answers(world, prepared)
    first, second = source.take(NUM_PROMPTS), source.take(NUM_PROMPTS)
    assert len(set(prompts_of(first))) == NUM_PROMPTS
    assert set(prompts_of(first)) == set(prompts_of(second))
    assert prompts_of(first) != prompts_of(second)
    assert [group.group_index for group in first + second] == list(range(2 * NUM_PROMPTS))
    indices = [sample.index for sample in flatten(first + second)]
    assert indices == list(range(2 * NUM_PROMPTS * ANSWERS))


def test_groups_are_finished_and_hold_all_answers_to_one_prompt(
    world: World, prepared: Path
) -> None:
    for group in open_answers(world, prepared).take(NUM_PROMPTS):
        assert group.is_finished
        assert [sample.attempt for sample in group.samples] == list(range(ANSWERS))
        assert len(set(prompts_of([Group(0, [s]) for s in group.samples]))) == 1
        for sample in group.samples:
            assert sample.reward is None
            assert sample.teacher_log_probs is not None
            assert len(sample.teacher_log_probs) == sample.response_length
            assert sample.label == "".join(sorted(str(sample.prompt)))


def test_a_saved_position_goes_on_as_if_nothing_had_happened(world: World, prepared: Path) -> None:
    source = open_answers(world, prepared)
    taken = source.take(50)
    source.give_back(taken[-2:])
    state = json.loads(json.dumps(source.state_dict()))
    expected = [encode_group(group) for group in source.take(60)]
    other = open_answers(world, prepared)
    other.load_state_dict(state)
    assert [encode_group(group) for group in other.take(60)] == expected


def test_a_position_in_other_answers_is_refused_even_when_they_are_as_many(
    world: World, prepared: Path, copy: Path
) -> None:
    state = open_answers(world, prepared).state_dict()
    open_answers(world, copy).load_state_dict(state)  # the folder may move
    manifest = read_manifest(copy)
    turned = msgspec.structs.replace(manifest, shards=manifest.shards[::-1])
    write_manifest(copy, turned)
    with pytest.raises(CheckpointError, match="not one in these recorded answers"):
        open_answers(world, copy).load_state_dict(state)


def test_groups_that_were_never_taken_cannot_be_given_back(world: World, prepared: Path) -> None:
    source = open_answers(world, prepared)
    (group,) = source.take(1)
    with pytest.raises(ValueError, match="expected groups that were taken"):
        source.give_back([Group(5, group.samples)])
    with pytest.raises(ValueError, match="expected groups that were taken"):
        source.give_back([group, group])
