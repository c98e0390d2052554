"""Which token is chosen, and which log-prob is reported for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.engine.embedded.logprobs import note_input_logprobs
from rollmill.engine.embedded.sampler import Sampler, uniform_numbers
from rollmill.engine.embedded.sampling import SamplingParams
from rollmill.engine.embedded.sequence import LogprobRequest, Sequence
from rollmill.engine.embedded.steps import Chunk, Fill


def sequence(seed: int = 0, output: list[int] | None = None, **params: Any) -> Sequence:
    made = Sequence("r", [1], SamplingParams(**params), LogprobRequest(True), seed=seed)
    for token in output or []:
        made.append(token, -1.0, "v")
    return made


def sample(logits: list[float] | torch.Tensor, count: int, **params: Any) -> Any:
    row = torch.as_tensor(logits, dtype=torch.float32)
    sequences = [sequence(seed, **params) for seed in range(count)]
    return Sampler(frozenset({0})).sample(sequences, row.repeat(count, 1))


def frequencies(logits: list[float], **params: Any) -> list[float]:
    tokens = sample(logits, 20_000, **params).tokens
    return [tokens.count(i) / len(tokens) for i in range(len(logits))]


LOGITS = [math.log(p) for p in (0.5, 0.25, 0.15, 0.07, 0.03)]


def test_tokens_follow_the_softmax() -> None:
    assert frequencies(LOGITS) == pytest.approx([0.5, 0.25, 0.15, 0.07, 0.03], abs=0.015)


def test_temperature_scales_the_logits() -> None:
    squares = np.array([0.5, 0.25, 0.15, 0.07, 0.03]) ** 2
    assert frequencies(LOGITS, temperature=0.5) == pytest.approx(
        list(squares / squares.sum()), abs=0.015
    )


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.49}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.76}, 3),
        ({"min_p": 0.29}, 3),
        ({"min_p": 0.31}, 2),
        ({"top_k": 3, "top_p": 0.4}, 1),
    ],
)
def test_filters_keep_the_most_likely_tokens(params: dict[str, Any], kept: int) -> None:
    probs = np.array([0.5, 0.25, 0.15, 0.07, 0.03][:kept])
    expected = [*(probs / probs.sum()), *[0.0] * (5 - kept)]
    assert frequencies(LOGITS, **params) == pytest.approx(expected, abs=0.015)


def test_filters_do_not_change_the_reported_logprob() -> None:
    sampled = sample(LOGITS, 50, top_k=2)
    for token, logprob in zip(sampled.tokens, sampled.logprobs, strict=True):
        assert logprob == pytest.approx(LOGITS[token], abs=1e-6)


def test_greedy_takes_the_best_and_reports_temperature_one() -> None:
    sampled = sample(LOGITS, 3, is_greedy=True)
    assert sampled.tokens == [0, 0, 0]
    assert sampled.logprobs == pytest.approx([math.log(0.5)] * 3, abs=1e-6)


def test_scaled_logprob_is_reported() -> None:
    sampled = sample([2.0, 1.0], 20, temperature=2.0)
    expected = [1.0 - math.log(math.e**1 + math.e**0.5), 0.5 - math.log(math.e**1 + math.e**0.5)]
    for token, logprob in zip(sampled.tokens, sampled.logprobs, strict=True):
        assert logprob == pytest.approx(expected[token], abs=1e-6)


def test_flat_and_peaked_filters_agree_with_a_full_sort() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5000) * 0.1  # flat: 1024 candidates do not hold 0.9
    tokens = sample(logits, 1500, top_p=0.9).tokens
    order = logits.softmax(-1).sort(descending=True)
    allowed = set(order.indices[(order.values.cumsum(-1) - order.values) <= 0.9].tolist())
    assert len(allowed) > 2000
    assert set(tokens) <= allowed
    assert len(set(tokens) - set(order.indices[:1024].tolist())) > 300


def test_large_vocabularies_are_sampled_over_their_whole_width() -> None:
    vocab = 1000
    tokens = np.array(sample(torch.zeros(vocab), 20_000).tokens)
    counts = np.bincount(tokens, minlength=vocab)
    assert len(counts) == vocab
    chi_square = float(((counts - 20) ** 2 / 20).sum())
    assert 850 < chi_square < 1150  # 999 degrees of freedom, four standard deviations are 179


def test_impossible_tokens_are_never_chosen() -> None:
    logits = torch.full((700,), float("-inf"))
    logits[3] = logits[699] = 0.0
    assert set(sample(logits, 500).tokens) == {3, 699}


def test_same_seed_and_position_choose_the_same_token_in_any_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(300)
    alone = Sampler(frozenset()).sample([sequence(5)], logits[None].clone()).tokens
    others = [sequence(9, temperature=0.3), sequence(5), sequence(8, top_k=5)]
    crowd = Sampler(frozenset()).sample(others, logits.repeat(3, 1)).tokens
    assert crowd[1] == alone[0]


def test_uniform_numbers_are_uniform_and_fixed() -> None:
    many = uniform_numbers(list(range(10_000)), [3] * 10_000)
    assert 0 <= many.min() < 0.001
    assert 0.999 < many.max() < 1
    assert abs(float(many.mean()) - 0.5) < 0.01
    along = uniform_numbers([1] * 10_000, list(range(10_000)))
    assert abs(float(np.corrcoef(along[1:], along[:-1])[0, 1])) < 0.03
    assert uniform_numbers([2**63, -1], [0, 0])[0] == uniform_numbers([2**63], [0])[0]


def test_penalties_count_output_tokens() -> None:
    row = torch.tensor([[1.0, 2.0, -1.0, 0.5]])
    one = sequence(output=[1, 1, 2], frequency_penalty=0.25, presence_penalty=0.5)
    Sampler(frozenset()).sample([one], row)
    assert row.tolist() == [[1.0, 1.0, -1.75, 0.5]]
    row = torch.tensor([[1.0, 2.0, -1.0, 0.5]])
    one = sequence(output=[1, 2], repetition_penalty=2.0, logit_bias=((3, 1.5),))
    Sampler(frozenset()).sample([one], row)
    assert row.tolist() == [[1.0, 1.0, -2.0, 2.0]]


def test_stop_tokens_are_held_back_until_the_minimum() -> None:
    sampler, logits = Sampler(frozenset({0})), torch.tensor([[9.0, 0.0, 5.0]])
    params = {"is_greedy": True, "stop_token_ids": frozenset({2})}
    held = sampler.sample([sequence(min_new_tokens=1, **params)], logits.clone())
    assert held.tokens == [1]
    free = sampler.sample([sequence(output=[1], min_new_tokens=1, **params)], logits.clone())
    assert free.tokens == [0]


def test_logits_that_are_not_finite_are_told() -> None:
    rows = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    sampled = Sampler(frozenset()).sample([sequence(), sequence()], rows)
    assert sampled.is_finite == [False, True]


def test_top_and_named_logprobs() -> None:
    one = Sequence(
        "r",
        [1],
        SamplingParams(is_greedy=True),
        LogprobRequest(True, num_top=2, token_ids=(4, 0)),
        seed=0,
    )
    sampled = Sampler(frozenset()).sample([one], torch.tensor([LOGITS]))
    assert [t for _, t in sampled.top[0]] == [0, 1]
    assert [lp for lp, _ in sampled.top[0]] == pytest.approx(LOGITS[:2], abs=1e-6)
    assert [t for _, t in sampled.by_id[0]] == [4, 0]
    assert [lp for lp, _ in sampled.by_id[0]] == pytest.approx([LOGITS[4], LOGITS[0]], abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_prompt_logprobs_are_those_of_the_softmax(scale: float) -> None:
    prompt = [(11 * i) % 300 for i in range(81)]
    scored = Sequence("r", prompt, SamplingParams(), LogprobRequest(True, start_len=0), seed=0)
    logits = torch.randn(80, 300, generator=torch.Generator().manual_seed(0)) * scale
    fill = Fill(scored, block=1, tokens=np.asarray(prompt[:-1], np.int32), done=0)
    note_input_logprobs(Chunk(fill, 0, 80), 0, logits)
    exact = logits.double().log_softmax(-1)
    expected = [float(exact[i, token]) for i, token in enumerate(prompt[1:])]
    assert scored.input_logprobs.chosen == pytest.approx(expected, abs=1e-6)
