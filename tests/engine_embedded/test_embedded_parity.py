"""The engine's log-probs are those of an ordinary forward of the same model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_helpers import SMALL, make_model, plain_logits
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.engine.embedded.attention import rows_attention
from rollmill.engine.embedded.model import ModelRunner
from rollmill.engine.embedded.sampler import Sampler
from rollmill.engine.embedded.sampling import SamplingParams
from rollmill.engine.embedded.scheduler import Scheduler
from rollmill.engine.embedded.sequence import LogprobRequest, Sequence
from rollmill.errors import ConfigError, ModelError

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama_untied_no_groups": lambda: LlamaConfig(
        **SMALL | {"tie_word_embeddings": False, "num_key_value_heads": 4}
    ),
    "qwen2_sliding": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mistral_sliding": lambda: MistralConfig(**SMALL, sliding_window=9),
    "gemma2": lambda: Gemma2Config(**SMALL, query_pre_attn_scalar=8, sliding_window=11),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, query_pre_attn_scalar=8, sliding_window=10),
    "gpt_oss": lambda: GptOssConfig(
        **SMALL | {"tie_word_embeddings": False},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=10,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=1
    ),
    "phi3_sliding": lambda: Phi3Config(**SMALL, sliding_window=9),
    "cohere2_sliding": lambda: Cohere2Config(**SMALL, sliding_window=9),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{name: value for name, value in SMALL.items() if name != "head_dim"}
        | {"num_key_value_heads": 4, "tie_word_embeddings": False},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}


class Bench:
    """Scheduler, runner and sampler without threads or HTTP."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = EmbeddedEngineConfig(device="cpu", **settings)
        self.runner = ModelRunner(str(folder), config)
        self.scheduler = Scheduler(self.runner.limits)
        self.sampler = Sampler(frozenset())
        self.num_chunks = 0

    def run(self, sequences: list[Sequence], max_steps: int = 2000) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
        for _ in range(max_steps):
            if not self.scheduler.num_unfinished:
                return
            self.step()
        raise AssertionError("the sequences never ended")

    def step(self) -> None:
        step = self.scheduler.plan()
        self.runner.carry_out(step)
        self.num_chunks += len(step.chunks)
        logits = self.runner.compute(step)
        if logits.sequences:
            with torch.inference_mode():
                sampled = self.sampler.sample(logits.sequences, logits.decode)
            rows = zip(logits.sequences, sampled.tokens, sampled.logprobs, strict=True)
            for sequence, token, logprob in rows:
                sequence.append(token, logprob, "v")
                if len(sequence.output) >= sequence.params.max_new_tokens:
                    self.scheduler.retire(sequence)
        self.scheduler.commit(step)


def sequences_for(prompts: list[list[int]], lengths: list[int], seed: int = 0) -> list[Sequence]:
    return [
        Sequence(
            f"{i}",
            prompt,
            SamplingParams(max_new_tokens=length, temperature=0.9),
            LogprobRequest(True),
            seed=seed + i,
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def random_prompts(count: int, low: int, high: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2, 64) for _ in range(rng.randint(low, high))] for _ in range(count)]


def assert_logprobs_agree(model: Any, sequences: list[Sequence], limit: float = 1e-4) -> None:
    for sequence in sequences:
        logits = plain_logits(model, sequence.prompt + sequence.output)
        logprobs = (logits / sequence.params.temperature).log_softmax(-1)
        first = len(sequence.prompt) - 1
        for i, (token, found) in enumerate(
            zip(sequence.output, sequence.output_logprobs, strict=True)
        ):
            assert abs(float(logprobs[first + i, token]) - found) < limit


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_agree_with_an_ordinary_forward(family: str, tmp_path: Path) -> None:
    make_model(FAMILIES[family]()).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    bench = Bench(tmp_path, chunked_prefill_tokens=7)
    prompts = random_prompts(5, 1, 30)
    prompts += [list(prompts[0]), list(prompts[1]), prompts[2] + [5, 6, 7]]
    sequences = sequences_for(prompts, [3, 20, 9, 14, 1, 8, 8, 8])
    bench.run(sequences)
    assert_logprobs_agree(model, sequences)


def test_text_does_not_depend_on_the_batch(llama_folder: Path) -> None:
    prompts, lengths = random_prompts(6, 2, 40), [30, 5, 12, 30, 1, 17]
    together = sequences_for(prompts, lengths)
    Bench(llama_folder).run(together)
    alone = sequences_for(prompts, lengths)
    for sequence in alone:
        Bench(llama_folder, chunked_prefill_tokens=3).run([sequence])
    assert [s.output for s in alone] == [s.output for s in together]


def test_a_groups_prompt_is_computed_once(llama_folder: Path) -> None:
    bench = Bench(llama_folder)
    prompt = random_prompts(1, 30, 30)[0]
    group = sequences_for([list(prompt) for _ in range(8)], [4] * 8)
    bench.run(group)
    assert bench.num_chunks == 1
    assert sorted(s.cached_tokens or 0 for s in group) == [0] + [29] * 7
    late = sequences_for([list(prompt)], [4])
    bench.run(late)
    assert bench.num_chunks == 1
    model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    assert_logprobs_agree(model, group + late)


def test_the_next_turn_of_a_conversation_goes_on_from_the_last(llama_folder: Path) -> None:
    bench = Bench(llama_folder)
    (first,) = sequences_for(random_prompts(1, 20, 20), [30])
    bench.run([first])
    (second,) = sequences_for([[*first.prompt, *first.output, 9, 10, 11]], [20])
    bench.run([second])
    assert second.cached_tokens == 49
    model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    assert_logprobs_agree(model, [first, second])


def test_logprobs_agree_after_preemption(llama_folder: Path) -> None:
    bench = Bench(llama_folder, max_total_tokens=900)
    prompts = random_prompts(4, 100, 120)
    sequences = sequences_for(prompts, [60] * 4)
    bench.run(sequences)
    assert sum(s.num_retractions for s in sequences) > 0
    model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    assert_logprobs_agree(model, sequences)


def test_logprobs_agree_when_rows_outgrow_their_size(llama_folder: Path) -> None:
    bench = Bench(llama_folder)
    sequences = sequences_for(random_prompts(3, 100, 140), [200, 20, 60])
    bench.run(sequences)
    model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    assert_logprobs_agree(model, sequences)


def test_bfloat16_stays_close(llama_folder: Path) -> None:
    bench = Bench(llama_folder, dtype="bfloat16")
    sequences = sequences_for(random_prompts(4, 5, 30), [10] * 4)
    bench.run(sequences)
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.bfloat16).eval()
    assert_logprobs_agree(model, sequences, limit=0.2)


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        Bench(tmp_path / "nowhere")


def test_missing_weights_are_a_model_error(llama_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        Bench(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    ],
    ids=["no attention", "biased attention"],
)
def test_models_that_it_cannot_run_are_refused(config: Any, tmp_path: Path) -> None:
    make_model(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="SGLang"):
        Bench(tmp_path)


def test_a_model_that_it_gets_wrong_is_refused(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        kwargs["scaling"] *= 1.5
        return rows_attention(*args, **kwargs)

    monkeypatch.setattr("rollmill.engine.embedded.attention.rows_attention", wrong)
    with pytest.raises(ModelError, match="other log-probs"):
        Bench(llama_folder)


def test_a_useless_cache_size_is_a_config_error(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_total_tokens"):
        Bench(llama_folder, max_total_tokens=100)
