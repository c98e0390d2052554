"""The scheduler alone: no model, only its promises."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.embedded.prefixes import PrefixIndex, Tokens, common_prefix
from rollmill.engine.embedded.sampling import SamplingParams
from rollmill.engine.embedded.scheduler import Scheduler
from rollmill.engine.embedded.sequence import LogprobRequest, Sequence
from rollmill.engine.embedded.steps import Limits, Step

LIMITS = Limits(max_running=4, max_total_tokens=4096, chunk_tokens=16, context_length=1024)


def sequence(prompt: list[int], new: int = 4, start_len: int = -1) -> Sequence:
    wanted = LogprobRequest(is_wanted=True, start_len=start_len)
    return Sequence("r", prompt, SamplingParams(max_new_tokens=new), wanted, seed=0)


@dataclass
class FakeModel:
    """Follows steps as the real one does, and checks that they make sense."""

    scheduler: Scheduler
    blocks: dict[int, list[int | None]] = field(default_factory=dict)
    rows: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0
    finished: list[Sequence] = field(default_factory=list)

    def step(self) -> Step:
        step = self.scheduler.plan()
        limits = self.scheduler.limits
        assert self.scheduler.tokens_reserved <= limits.max_total_tokens
        assert len(step.decode) + len(self.scheduler.fills) <= limits.max_running
        assert sum(chunk.count for chunk in step.chunks) <= limits.chunk_tokens
        self.follow(step)
        for running in step.decode:
            assert self.rows[id(running)] == (running.prompt + running.output)[:-1]
            self.rows[id(running)].append(running.last_token)
            running.append(7, -1.0, "v")
            if len(running.output) == running.params.max_new_tokens:
                self.scheduler.retire(running)
                self.finished.append(running)
        self.finished += step.finished
        self.finished += self.scheduler.commit(step)
        return step

    def follow(self, step: Step) -> None:
        for dropped in step.dropped_rows:
            row = self.rows.pop(id(dropped.sequence))
            if dropped.saved_as is not None:
                self.blocks[dropped.saved_as] = [*row[: dropped.length]]
        for new in step.new_blocks:
            shared = [] if new.source is None else self.blocks[new.source][: new.num_shared]
            assert None not in shared
            self.blocks[new.block] = [*shared, *[None] * (new.length - len(shared))]
        for admission in step.admissions:
            held = [] if admission.block is None else self.blocks[admission.block]
            context = admission.sequence.context()
            assert held[: len(context)] == context
            self.rows[id(admission.sequence)] = context
        for block in step.dropped_blocks:
            self.blocks.pop(block, None)
        for chunk in step.chunks:
            end = chunk.start + chunk.count
            block = self.blocks[chunk.fill.block]
            assert None not in block[: chunk.start]
            block[chunk.start : end] = chunk.fill.tokens[chunk.start : end].tolist()
            self.computed += chunk.count

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.num_unfinished:
                return
            self.step()
        raise AssertionError("the sequences never ended")


def test_a_prompt_is_prefilled_in_chunks_and_then_decoded() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(list(range(2, 42)), new=2))
    model = FakeModel(scheduler)
    steps = [model.step() for _ in range(5)]
    assert [sum(c.count for c in s.chunks) for s in steps] == [16, 16, 7, 0, 0]
    assert [len(s.decode) for s in steps] == [0, 0, 0, 1, 1]
    assert scheduler.num_unfinished == 0


def test_a_shared_prompt_is_computed_once() -> None:
    scheduler = Scheduler(LIMITS)
    for _ in range(6):
        scheduler.add(sequence(list(range(2, 22))))
    model = FakeModel(scheduler)
    model.run()
    assert model.computed == 19
    assert [s.cached_tokens for s in model.finished] == [0] + [19] * 5


def test_a_longer_prompt_continues_a_held_prefix() -> None:
    scheduler = Scheduler(LIMITS)
    model = FakeModel(scheduler)
    scheduler.add(sequence(list(range(2, 22))))
    model.run()
    scheduler.add(sequence([*range(2, 22), 50, 51, 52]))
    model.run()
    assert model.computed == 19 + 2
    assert model.finished[1].cached_tokens == 20


def test_a_finished_answer_serves_the_next_turn() -> None:
    scheduler = Scheduler(LIMITS)
    model = FakeModel(scheduler)
    first = sequence(list(range(2, 22)), new=10)
    scheduler.add(first)
    model.run()
    before = model.computed
    scheduler.add(sequence([*first.prompt, *first.output, 50, 51, 52]))
    model.run()
    # The last token was never an input, so it is computed with the three new ones but one.
    assert model.computed - before == 3
    assert model.finished[1].cached_tokens == 29


def test_held_prefixes_are_found_among_many() -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 9, 40, dtype=np.int32)
    index = PrefixIndex()
    for block in range(300):
        tail = rng.integers(0, 9, 40, dtype=np.int32)
        index.add(block, np.concatenate([shared, tail]))
    query = np.concatenate([index.entries[123][:70], np.array([50], np.int32)])
    assert index.longest(query, len(query)) == (123, 70)
    assert index.longest(query, 35)[1] == 35
    stranger = np.concatenate([shared[:33], np.full(20, 77, np.int32)])
    assert index.longest(stranger, len(stranger))[1] == 33
    index.clear()
    assert not index._by_run
    assert not index._exact


def test_wanted_prompt_logprobs_are_computed_not_taken_from_the_cache() -> None:
    scheduler = Scheduler(LIMITS)
    model = FakeModel(scheduler)
    for start in (-1, 0, 20):
        scheduler.add(sequence(list(range(2, 42)), start_len=start))
        model.run()
    assert [s.cached_tokens for s in model.finished] == [0, 0, 20]
    assert model.computed == 39 + 39 + 19


def test_requests_without_new_tokens_end_with_their_prompt() -> None:
    scheduler = Scheduler(LIMITS)
    model = FakeModel(scheduler)
    scheduler.add(sequence(list(range(2, 22)), new=0))
    scheduler.add(sequence(list(range(2, 22)), new=0, start_len=0))
    scheduler.add(sequence([5], new=0, start_len=0))
    model.run()
    assert len(model.finished) == 3
    assert model.computed == 19


def test_forgetting_prefixes_restarts_unfinished_prefills() -> None:
    scheduler = Scheduler(LIMITS)
    model = FakeModel(scheduler)
    scheduler.add(sequence(list(range(2, 42))))
    model.step()
    scheduler.forget_prefixes()
    model.run()
    assert model.computed == 16 + 39
    assert len(model.finished) == 1


def test_the_youngest_is_retracted_when_room_runs_out() -> None:
    limits = Limits(max_running=4, max_total_tokens=500, chunk_tokens=512, context_length=512)
    scheduler = Scheduler(limits)
    old, young = sequence(list(range(2, 102)), new=80), sequence(list(range(200, 300)), new=80)
    scheduler.add(old)
    scheduler.add(young)
    model = FakeModel(scheduler)
    model.run()
    assert (old.num_retractions, young.num_retractions) == (0, 1)
    assert model.finished == [old, young]


def test_retract_all_keeps_tokens_and_order() -> None:
    scheduler = Scheduler(LIMITS)
    model = FakeModel(scheduler)
    sequences = [sequence([i, i + 1, i + 2], new=9) for i in range(2, 8)]
    for one in sequences:
        scheduler.add(one)
    for _ in range(4):
        model.step()
    written = [len(s.output) for s in sequences]
    scheduler.retract_all()
    assert list(scheduler.waiting) == sequences
    assert [len(s.output) for s in sequences] == written
    model.run()
    assert {id(s) for s in model.finished} == {id(s) for s in sequences}


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_running=st.integers(1, 6),
    max_total=st.integers(300, 1500),
    chunk=st.integers(1, 64),
)
def test_everything_ends_within_the_limits(
    seed: int, max_running: int, max_total: int, chunk: int
) -> None:
    rng = random.Random(seed)
    limits = Limits(max_running, max_total, chunk, context_length=256)
    scheduler = Scheduler(limits)
    model = FakeModel(scheduler)
    prompts = [[rng.randrange(2, 9) for _ in range(rng.randint(1, 60))] for _ in range(3)]
    added: list[Sequence] = []
    removed: list[Sequence] = []
    for _ in range(rng.randint(5, 60)):
        event = rng.random()
        if event < 0.4:
            prompt = [*rng.choice(prompts)[: rng.randint(1, 60)], rng.randrange(2, 9)]
            one = sequence(prompt, rng.randint(0, 40), rng.choice([-1, -1, 0, len(prompt) - 1]))
            if scheduler.check_fits(len(prompt), one.params.max_new_tokens):
                scheduler.add(one)
                added.append(one)
        elif event < 0.5 and added:
            victim = rng.choice(added)
            removed += scheduler.remove(lambda s, victim=victim: s is victim)
        elif event < 0.55:
            scheduler.retract_all()
        elif event < 0.6:
            scheduler.forget_prefixes()
        elif scheduler.num_unfinished:
            model.step()
    model.run()
    ended = [id(s) for s in model.finished + removed]
    assert sorted(ended) == sorted(id(s) for s in added)
    for one in model.finished:
        assert len(one.output) == one.params.max_new_tokens
    model.follow(scheduler.plan())
    assert not model.rows
    assert set(model.blocks) == set(scheduler.prefixes.entries)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([2], [1], 0), ([1, 2, 3], [1, 2], 2)],
)
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == shared


def test_the_prefix_that_was_not_used_for_longest_goes_first() -> None:
    index = PrefixIndex()
    one, two = np.arange(1, 20, dtype=np.int32), np.array([4, 5], np.int32)
    query = np.concatenate([one[:17], two])
    assert index.add(0, one)
    assert index.add(1, two)
    assert not index.add(2, one)
    assert index.longest(query, len(query)) == (0, 17)
    assert index.longest(query, 16) == (0, 16)
    assert index.pop_oldest(keep=1) == 0
    assert index.num_tokens == 2
    assert index.clear() == [1]
    assert index.num_tokens == 0


class CountingIndex(PrefixIndex):
    """Knows how often it was searched."""

    num_searches = 0

    def longest(self, tokens: Tokens, limit: int) -> tuple[int | None, int]:
        CountingIndex.num_searches += 1
        return PrefixIndex.longest(self, tokens, limit)


def test_those_who_wait_for_a_long_prompt_are_looked_at_once() -> None:
    CountingIndex.num_searches = 0
    limits = Limits(max_running=200, max_total_tokens=10**6, chunk_tokens=16, context_length=1024)
    model = FakeModel(Scheduler(limits, prefixes=CountingIndex()))
    for _ in range(100):
        model.scheduler.add(sequence(list(range(500)), new=1))
    while not model.scheduler.running:
        assert len(model.scheduler.fills) <= 1
        step = model.scheduler.plan()
        model.follow(step)
        model.scheduler.commit(step)
    # Each when it came, and each again when the prompt was there: not 100 in each of 32 steps.
    assert CountingIndex.num_searches == 200
    assert len(model.scheduler.running) == 100
    assert model.computed == 499


def test_those_who_waited_for_a_prompt_that_was_aborted_compute_it_themselves() -> None:
    model = FakeModel(Scheduler(LIMITS))
    first, second = sequence(list(range(100))), sequence(list(range(100)))
    model.scheduler.add(first)
    model.scheduler.add(second)
    model.step()
    model.scheduler.remove(lambda s: s is first)
    for _ in range(30):
        model.step()
    assert model.finished == [second]
