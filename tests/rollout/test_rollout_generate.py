"""What generate functions work with: budgets, continuation, text, isolation, seeds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_helpers import run
from tiny import make_tiny_model

from rollmill.config.engine import EngineConfig
from rollmill.config.sampling import SamplingConfig
from rollmill.data import load_tokenizer
from rollmill.engine.pool import EnginePool
from rollmill.engine.types import FinishReason, GenerateResult, VersionSpan
from rollmill.errors import EngineError, RolloutError
from rollmill.rollout.gate import GateClosed
from rollmill.rollout.generate import (
    GenerateContext,
    cut_stop,
    generate_single_turn,
    mask_older_than,
)
from rollmill.rollout.seeds import call_seed
from rollmill.rollout.usage import Loss
from rollmill.sample import Sample, Segment, Status, float_array, int_array
from rollmill.testing import FakeEngines, make_context, make_sample


def written(length: int, version: int = 0) -> Segment:
    return Segment.from_engine(range(3, 3 + length), [-0.5] * length, version)


def test_what_is_left_of_the_limit_is_asked_for_and_the_context_is_never_passed() -> None:
    async def main() -> None:
        for max_new, context_length, asked in ((20, 512, 14), (20, 13, 3), (8, 512, 2)):
            engines = FakeEngines(100)
            context = make_context(
                engines,
                sampling=SamplingConfig(max_new_tokens=max_new),
                context_length=context_length,
            )
            sample = make_sample(segments=[written(6)], status=Status.ABORTED)
            await context.extend(sample)
            (call,) = engines.calls
            assert call.sampling["max_new_tokens"] == asked
            assert call.input_ids == (10, 11, 12, 13, *range(3, 9))
            assert sample.status is Status.TRUNCATED
            assert len(sample.tokens) <= context_length

    run(main)


def test_the_least_number_of_tokens_is_that_of_the_whole_response() -> None:
    async def main() -> None:
        engines = FakeEngines(100)
        sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=15)
        context = make_context(engines, sampling=sampling)
        for num_before, limit in ((0, None), (6, None), (16, None), (0, 8)):
            before = [written(num_before)] if num_before else []
            await context.extend(make_sample(segments=before), limit)
        asked = [
            (c.sampling["min_new_tokens"], c.sampling["max_new_tokens"]) for c in engines.calls
        ]
        assert asked == [(15, 20), (9, 14), (0, 4), (8, 8)]  # engines refuse more than the limit

    run(main)


@pytest.mark.parametrize(("max_new", "context_length"), [(6, 512), (5, 512), (64, 10), (64, 9)])
def test_no_tokens_left_is_truncated_without_a_call(max_new: int, context_length: int) -> None:
    async def main() -> None:
        engines = FakeEngines()
        context = make_context(
            engines, sampling=SamplingConfig(max_new_tokens=max_new), context_length=context_length
        )
        sample = make_sample(segments=[written(6)], status=Status.ABORTED)
        await context.extend(sample)
        assert sample.status is Status.TRUNCATED
        assert engines.calls == []

    run(main)


def test_an_engine_error_reaches_the_generate_function() -> None:
    def fault(_: object) -> None:
        raise EngineError("no")

    async def main() -> None:
        engines = FakeEngines()
        engines.fault = fault
        sample = make_sample()
        with pytest.raises(EngineError):
            await make_context(engines).extend(sample)
        assert sample.status is Status.PENDING

    run(main)


def test_no_call_sees_another_calls_sampling_parameters() -> None:
    async def main() -> None:
        engines = FakeEngines()
        context = make_context(engines, sampling=SamplingConfig(max_new_tokens=9, stop=("x",)))
        other = context.with_sampling(max_new_tokens=3, temperature=0.5)
        await asyncio.gather(other.extend(make_sample(0)), context.extend(make_sample(1)))
        engines.calls[0].sampling["stop"].append("mine")
        await context.extend(make_sample(2))
        asked = [(c.sampling["max_new_tokens"], c.sampling["temperature"]) for c in engines.calls]
        assert asked == [(3, 0.5), (9, 1.0), (9, 1.0)]
        assert engines.calls[2].sampling["stop"] == ["x"]
        with pytest.raises(ValueError, match="frozen"):
            context.sampling.max_new_tokens = 1  # type: ignore[misc]

    run(main)


def test_the_gate_limits_requests_not_samples() -> None:
    async def main() -> None:
        engines = FakeEngines()
        context = make_context(engines, max_requests=3)
        engines.hold()
        tasks = [asyncio.create_task(context.extend(make_sample(i))) for i in range(10)]
        await engines.wait_for_calls(3)
        assert engines.num_running == context.gate.num_inside == 3
        engines.release()
        await asyncio.gather(*tasks)
        assert context.gate.high_water == 3

    run(main)


def test_a_closed_gate_gives_an_aborted_sample_without_a_call() -> None:
    async def main() -> None:
        engines = FakeEngines()
        context = make_context(engines)
        context.gate.close()
        sample = await context.extend(make_sample())
        assert sample.status is Status.ABORTED
        assert engines.calls == []
        with pytest.raises(GateClosed):
            await context.wait_for(asyncio.sleep(0))

    run(main)


class Phrases:
    """Decodes tokens as fixed words, so that stop strings can be placed."""

    chat_template = None

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        words = {1: "look ", 2: "</s>", 3: "STOP", 4: "found ", 5: "done ", 6: "S", 7: "TO", 8: "P"}
        return "".join(words[token] for token in token_ids)


def context_with(stop: tuple[str, ...]) -> GenerateContext:
    context = make_context(sampling=SamplingConfig(stop=stop))
    return replace(context, tokenizer=Phrases())  # type: ignore[arg-type]


def test_a_stop_string_of_an_earlier_turn_does_not_cut_the_text() -> None:
    context = context_with(("STOP",))
    sample = make_sample(status=Status.COMPLETED)
    sample.segments = [
        Segment.from_engine([1, 3], [-1, -1], 0),
        Segment.from_environment([4]),
        Segment.from_engine([5, 3], [-1, -1], 0),
    ]
    assert context.text_of(sample, num_before=3) == "look STOPfound done "
    assert context.text_of(sample) == "look "  # as one turn, the first stop is the end


def test_the_token_that_ended_an_answer_is_not_in_its_text() -> None:
    context = context_with(("never",)).with_sampling(stop_token_ids=(3,))
    sample = make_sample(segments=[Segment.from_engine([1, 3, 5, 3], [-1] * 4, 0)])
    for status, text in (
        (Status.COMPLETED, "look STOPdone "),
        (Status.TRUNCATED, "look STOPdone STOP"),
    ):
        sample.status = status
        assert context.text_of(sample) == text


@pytest.mark.timeout(120)
def test_an_answer_in_two_calls_reads_as_in_one(tmp_path: Path) -> None:
    """On a real engine, with special tokens shown and an ordinary token that ends the answer."""
    folder = make_tiny_model(tmp_path / "model", seed=3)
    tokenizer = load_tokenizer(folder)
    ends = tuple(range(3, 30))  # ordinary tokens: an untrained model soon writes one
    sampling = SamplingConfig(
        max_new_tokens=20, temperature=1.0, stop_token_ids=ends, skip_special_tokens=False
    )
    config = EngineConfig(embedded={"num_threads": 1})

    async def main() -> None:
        async with EnginePool(config, model_path=str(folder), run_dir=tmp_path) as pool:
            context = replace(
                make_context(pool, sampling=sampling, context_length=32), tokenizer=tokenizer
            )
            num_ended = 0
            for index in range(12):
                whole = await context.extend(make_sample(index, group_index=index))
                last = whole.segments[-1]
                half = make_sample(index, group_index=index, status=whole.status)
                half.segments = [Segment.from_engine(last.token_ids, last.log_probs, 0)]
                assert context.text_of(half) == whole.response
                num_ended += whole.status is Status.COMPLETED
            assert num_ended >= 8

    run(main, limit_s=100)


def test_a_stop_string_across_a_continuation_is_cut() -> None:
    assert cut_stop("abc STOP", ("STOP",), start=6) == "abc "
    assert cut_stop("STOP abc", ("STOP",), start=4) == "STOP abc"
    assert cut_stop("a||b", ("", "|"), start=0) == "a"
    assert cut_stop("nothing", ("x",)) == "nothing"


class Continuing(FakeEngines):
    """Goes on with given tokens, whatever it reads."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    async def generate(self, *_: Any, **__: Any) -> GenerateResult:
        span = VersionSpan(4, 0, len(self.tokens))
        log_probs = [-1.0 - place for place in range(len(self.tokens))]
        return GenerateResult(
            int_array(self.tokens), float_array(log_probs), (span,), FinishReason.LENGTH
        )


@pytest.mark.parametrize(
    ("before", "after", "kept", "text"),
    [
        ((1, 6), (7, 8, 1, 1), (1, 6, 7, 8), "look "),  # S|TO P: what follows is no answer
        ((1, 6, 7), (8, 1), (1, 6, 7, 8), "look "),
        ((1, 6), (7, 1, 1), (1, 6, 7, 1, 1), "look STOlook look "),
        ((1, 3), (1, 1), (1, 3, 1, 1), "look STOPlook look "),  # whole before: an earlier turn's
    ],
)
def test_a_stop_string_that_an_abort_cut_through_still_ends_the_answer(
    before: tuple[int, ...], after: tuple[int, ...], kept: tuple[int, ...], text: str
) -> None:
    async def main() -> None:
        context = replace(context_with(("STOP", "never")), engines=Continuing(*after))
        first = Segment.from_engine(before, [-0.5] * len(before), 3)
        sample = make_sample(segments=[first], status=Status.ABORTED)
        sample.routed_experts = None
        await context.extend(sample)
        assert sample.response_tokens.tolist() == list(kept)
        assert sample.response == text
        is_ended = len(kept) < len(before) + len(after) or kept[-1] == 8
        assert sample.status is (Status.COMPLETED if is_ended else Status.TRUNCATED)
        assert context.usage.lost[Loss.ABORTED] == len(before) + len(after) - len(kept)
        num_new = len(kept) - len(before)
        assert sample.rollout_log_probs[len(before) :].tolist() == [-1.0, -2.0, -3.0][:num_new]
        assert sample.weight_versions.tolist() == [3] * len(before) + [4] * num_new

        between_turns = make_sample(status=Status.ABORTED)
        between_turns.segments = [first, Segment.from_environment(before)]
        await context.extend(between_turns)  # a tool's text is no beginning of a stop string
        assert between_turns.response_length == 2 * len(before) + len(after)

    run(main)


def test_tokens_of_old_weights_leave_the_loss_and_lengths_stay() -> None:
    sample = make_sample(segments=[written(3, 1), Segment.from_environment([9]), written(2, 4)])
    assert mask_older_than(sample, 4) == 3
    assert sample.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert len(sample.rollout_log_probs) == sample.response_length == 6
    np.testing.assert_array_equal(sample.weight_versions, [1, 1, 1, -1, 4, 4])


def test_no_two_calls_share_a_seed() -> None:
    seeds = set()
    for group in range(8):
        for attempt in range(4):
            for call in range(4):
                for scope in ("train", "eval/held_out"):
                    sample = make_sample(group_index=group, attempt=attempt)
                    seeds.add(call_seed(7, sample, call, scope))
    assert len(seeds) == 8 * 4 * 4 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert call_seed(7, make_sample(), 0) != call_seed(8, make_sample(), 0)


def test_a_continuation_has_a_seed_of_its_own() -> None:
    async def main() -> None:
        engines = FakeEngines(4)
        context = make_context(engines)

        async def twice(sample: Sample) -> Any:
            await context.extend(sample)
            await context.extend(sample)

        await twice(make_sample())
        first, second = (call.sampling["sampling_seed"] for call in engines.calls)
        assert first != second

    run(main)


def test_images_are_not_left_out_silently() -> None:
    async def main() -> None:
        sample = make_sample(multimodal_inputs={"images": ("a.png",)})
        with pytest.raises(RolloutError, match="the prompt has images") as caught:
            await generate_single_turn(sample, make_context(FakeEngines(4)))
        assert "data.images_key" in str(caught.value)

    run(main)
