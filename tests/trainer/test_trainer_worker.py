"""The trainer as its caller sees it: bytes and plain values, files, resume, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from trainer_testkit import make_group, tiny_llama, tiny_qwen3
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import CheckpointError, ConfigError, HookError, ModelError, TrainerError
from rollmill.sample import Sample, Segment
from rollmill.sample_codec import encode_group, encode_sample
from rollmill.trainer.replay import is_timing
from rollmill.trainer.worker import TorchTrainer

SaveModel = Callable[..., str]


def config(**changes: Any) -> dict[str, Any]:
    values = {"num_threads": 1, "optimizer": {"lr": 1e-2}, **changes}
    return TrainerConfig.model_validate(values).model_dump(mode="json")


def trainer(model_path: str, **changes: Any) -> TorchTrainer:
    return TorchTrainer(
        config=config(**changes),
        model_path=model_path,
        seed=0,
        num_total_steps=6,
        context_length=256,
    )


def batch(step: int) -> list[bytes]:
    rng = np.random.default_rng(step)
    return [encode_group(make_group(i, [1.0, 0.0, 0.5], rng=rng)) for i in range(2)]


def train(which: TorchTrainer, step: int) -> dict[str, float]:
    return which.train(batch(step), step=step, reward_key=None, max_new_tokens=8, temperature=1.0)


def weights(which: TorchTrainer, folder: Path) -> dict[str, torch.Tensor]:
    which.write_weights(str(folder), dtype="float32")
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not is_timing(k)}


def test_everything_it_returns_can_be_sent(save_model: SaveModel, tmp_path: Path) -> None:
    which = trainer(save_model(tiny_llama()))
    results = [
        which.describe(),
        train(which, 0),
        which.score(
            [encode_sample(make_group(0, [1.0], rng=np.random.default_rng(0)).samples[0])],
            temperature=1.0,
        ),
        which.write_weights(str(tmp_path / "w"), dtype="bfloat16"),
    ]
    for result in results:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(result)) == result


@pytest.mark.parametrize("changes", [{}, {"global_batch_size": 3}])
def test_resuming_gives_the_same_weights_bit_for_bit(
    save_model: SaveModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = save_model(tiny_llama())
    schedule = {"optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2}}
    straight = trainer(path, **changes, **schedule)
    straight_metrics = [train(straight, step) for step in range(6)]
    first = trainer(path, **changes, **schedule)
    for step in range(3):
        train(first, step)
    first.save(str(tmp_path / "state"))
    second = trainer(path, **changes, **schedule)
    second.load(str(tmp_path / "state"))
    resumed_metrics = [train(second, step) for step in range(3, 6)]
    expected, found = weights(straight, tmp_path / "a"), weights(second, tmp_path / "b")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for before, after in zip(straight_metrics[3:], resumed_metrics, strict=True):
        assert without_times(before) == without_times(after)


def test_saving_does_not_disturb_training(save_model: SaveModel, tmp_path: Path) -> None:
    path = save_model(tiny_llama())
    quiet, saving = trainer(path), trainer(path)
    for step in range(3):
        train(quiet, step)
        train(saving, step)
        saving.save(str(tmp_path / f"s{step}"))
        saving.write_weights(str(tmp_path / "w"), dtype="bfloat16")
    expected, found = weights(quiet, tmp_path / "a"), weights(saving, tmp_path / "b")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_written_weights_load_and_are_the_trained_ones(
    make: Callable[[], Any], save_model: SaveModel, tmp_path: Path
) -> None:
    which = trainer(save_model(make()))
    train(which, 0)
    result = which.write_weights(str(tmp_path / "w"), dtype="bfloat16")
    assert result["num_bytes"] == (tmp_path / "w" / "model.safetensors").stat().st_size
    assert json.loads((tmp_path / "w" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "w", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    own = weights(which, tmp_path / "full")
    tied = "lm_head.weight" not in own
    assert tied == loaded.config.tie_word_embeddings
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, own[name].bfloat16()), name


def test_the_changed_share_counts_elements_in_engine_precision(
    save_model: SaveModel, tmp_path: Path
) -> None:
    which = trainer(save_model(tiny_llama()))
    folder = str(tmp_path / "w")
    assert which.write_weights(folder, dtype="bfloat16")["changed_share"] is None
    assert which.write_weights(folder, dtype="bfloat16")["changed_share"] == 0.0
    train(which, 0)
    assert 0.5 < which.write_weights(folder, dtype="bfloat16")["changed_share"] <= 1
    small = trainer(save_model(tiny_llama()), optimizer={"lr": 1e-9})
    small.write_weights(folder, dtype="bfloat16")
    train(small, 0)
    assert small.write_weights(folder, dtype="bfloat16")["changed_share"] < 0.01


def test_export_holds_the_tokenizer_and_loads(save_model: SaveModel, tmp_path: Path) -> None:
    path = save_model(tiny_llama())
    (Path(path) / "tokenizer.json").write_text("{}")
    (Path(path) / "chat_template.jinja").write_text("hi")
    which = trainer(path)
    train(which, 0)
    which.export(str(tmp_path / "out"))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    own = weights(which, tmp_path / "w")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.named_parameters())


def test_scores_are_the_log_probs_of_all_response_tokens(save_model: SaveModel) -> None:
    model = tiny_llama()
    which = trainer(save_model(model), max_tokens_per_micro_batch=16)
    samples = make_group(0, [None] * 5, rng=np.random.default_rng(1)).samples
    samples[2].segments = []
    scores = which.score([encode_sample(sample) for sample in samples], temperature=0.5)
    for sample, raw in zip(samples, scores, strict=True):
        start = len(sample.prompt_tokens)
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            rows = (model(tokens[None]).logits[0] / 0.5).log_softmax(-1)
        expected = rows[start - 1 : -1].gather(1, tokens[start:, None])[:, 0].numpy()
        np.testing.assert_allclose(np.frombuffer(raw, np.float32), expected, atol=1e-5)


def test_a_response_to_nothing_cannot_be_scored(save_model: SaveModel) -> None:
    sample = Sample(prompt_tokens=[], index=8, segments=[Segment.from_engine([5], [-1.0], 0)])
    with pytest.raises(TrainerError, match="sample 8"):
        trainer(save_model(tiny_llama())).score([encode_sample(sample)], temperature=1.0)


def test_state_of_another_model_is_refused(save_model: SaveModel, tmp_path: Path) -> None:
    which = trainer(save_model(tiny_llama()))
    which.save(str(tmp_path / "state"))
    other = trainer(save_model(tiny_llama(num_hidden_layers=1), "other"))
    with pytest.raises(CheckpointError, match="another model"):
        other.load(str(tmp_path / "state"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        other.load(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"algorithm": {"advantage": "gropo"}}, ConfigError, "did you mean grpo"),
        ({"algorithm": {"loss": "ppo"}}, ConfigError, "did you mean ppo_clip"),
        ({"algorithm": {"loss": "json:no_such"}}, HookError, "no_such"),
        ({"algorithm": {"loss": "json:loads"}}, HookError, "cannot be called"),
        ({"dtype": "float16"}, ConfigError, "bfloat16 or float32"),
    ],
)
def test_wrong_settings_stop_at_the_start(
    save_model: SaveModel, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer(save_model(tiny_llama()), **changes)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        trainer(str(tmp_path / "nowhere"))


def test_custom_functions_are_used(save_model: SaveModel, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from rollmill.trainer.losses import TokenLosses\n"
        "def advantages(inputs, config):\n"
        "    return [np.full(len(mask), 2.0) for mask in inputs.masks]\n"
        "def loss(tokens, config):\n"
        "    return TokenLosses(-3 * tokens.advantages * tokens.log_probs)\n"
        "def short(inputs, config):\n"
        "    return [np.zeros(1) for mask in inputs.masks]\n"
    )
    path = save_model(tiny_llama())

    def custom(**algorithm: str) -> TorchTrainer:
        return TorchTrainer(
            config=config(algorithm=algorithm),
            model_path=path,
            seed=0,
            num_total_steps=2,
            context_length=64,
            base_dir=str(tmp_path),
        )

    metrics = train(custom(advantage="mine.py:advantages", loss="mine.py:loss"), 0)
    assert metrics["advantage/mean"] == 2.0
    assert metrics["loss/total"] > 10
    with pytest.raises(HookError, match="shapes"):
        train(custom(advantage="mine.py:short"), 0)


def test_activation_checkpointing_gives_the_same_step(
    save_model: SaveModel, tmp_path: Path
) -> None:
    path = save_model(tiny_llama(attention_dropout=0.5))
    plain, saving = trainer(path), trainer(path, activation_checkpointing=True)
    runs = [0, 0]

    def count(which: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            runs[which] += 1

        return hook

    for number, one in enumerate((plain, saving)):
        one._policy.model.model.layers[0].mlp.register_forward_pre_hook(count(number))
    assert without_times(train(plain, 0)) == pytest.approx(without_times(train(saving, 0)))
    assert runs[1] == 2 * runs[0] > 0


def noisy_models() -> dict[str, Any]:
    """Models whose layers draw random numbers in training mode, each in another way."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    opt = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5}
    mixtral = {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
    return {
        "opt": OPTForCausalLM(OPTConfig(**shape, **opt)),
        "falcon": FalconForCausalLM(FalconConfig(**shape, hidden_dropout=0.5)),
        "mixtral": MixtralForCausalLM(MixtralConfig(**shape, **mixtral, router_jitter_noise=0.5)),
    }


@pytest.mark.parametrize("name", ["opt", "falcon", "mixtral"])
def test_log_probs_are_a_function_of_the_tokens(name: str, save_model: SaveModel) -> None:
    path = save_model(noisy_models()[name])
    sample = encode_sample(make_group(0, [1.0], rng=np.random.default_rng(0)).samples[0])
    expected = trainer(path).score([sample], temperature=1.0)
    saving = trainer(path, activation_checkpointing=True)
    assert saving.describe()["has_chunked_log_probs"]
    for _ in range(2):
        found = saving.score([sample], temperature=1.0)
        np.testing.assert_allclose(
            np.frombuffer(found[0], np.float32), np.frombuffer(expected[0], np.float32), atol=1e-5
        )


def test_an_export_that_cannot_be_written_says_so(save_model: SaveModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be exported"):
        trainer(save_model(tiny_llama())).export(str(tmp_path / "file" / "out"))
