"""Adapters: trained alone, merged on the way out, switched off for the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_testkit import make_group, tiny_llama, tiny_qwen3
from transformers import AutoModelForCausalLM

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import CheckpointError, ConfigError
from rollmill.sample import Group
from rollmill.sample_codec import encode_group, encode_sample
from rollmill.trainer.worker import TorchTrainer

pytest.importorskip("peft")

TRAIN: dict[str, Any] = {"reward_key": None, "max_new_tokens": 8, "temperature": 1.0}


def trainer(path: str, **changes: Any) -> TorchTrainer:
    values = {
        "num_threads": 1,
        "optimizer": {"lr": 1e-2},
        "lora": {"rank": 4, "alpha": 8},
        **changes,
    }
    return TorchTrainer(
        config=TrainerConfig.model_validate(values).model_dump(mode="json"),
        model_path=path,
        seed=0,
        num_total_steps=8,
        context_length=64,
    )


def groups(rng: np.random.Generator) -> list[Group]:
    return [make_group(i, [1.0, 0.0, 0.5], rng=rng, log_prob=-4.0) for i in range(3)]


def scores(which: TorchTrainer, batch: list[Group]) -> np.ndarray[Any, Any]:
    samples = [encode_sample(sample) for group in batch for sample in group.samples]
    return np.frombuffer(b"".join(which.score(samples, temperature=1.0)), np.float32)


def learn(which: TorchTrainer, batch: list[Group], step: int = 0) -> dict[str, float]:
    return which.train([encode_group(group) for group in batch], step=step, **TRAIN)


def test_only_adapters_are_trained_and_the_model_starts_as_it_was(
    save_model: Callable[..., str], rng: np.random.Generator
) -> None:
    path, batch = save_model(tiny_llama()), groups(rng)
    adapted, plain = trainer(path), trainer(path, lora=None)
    facts = adapted.describe()
    # Per block: q 32→32, k and v 32→16, o 32→32, gate and up 32→48, down 48→32; rank 4; 2 blocks.
    per_block = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert facts["trained_parameters"] == 2 * per_block
    assert plain.describe()["trained_parameters"] == plain.describe()["parameters"]
    np.testing.assert_allclose(scores(adapted, batch), scores(plain, batch), atol=1e-6)
    before = {name: p.clone() for name, p in adapted._policy.model.named_parameters()}
    learn(adapted, batch)
    for name, parameter in adapted._policy.model.named_parameters():
        is_same = torch.equal(parameter, before[name])
        assert is_same == ("lora_B" not in name), name  # A has no gradient while B is 0


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_written_weights_are_merged_and_load_as_a_plain_model(
    make: Callable[[], Any],
    save_model: Callable[..., str],
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    path, batch = save_model(make()), groups(rng)
    which = trainer(path)
    for step in range(2):
        learn(which, batch, step)
    first = which.write_weights(str(tmp_path / "engine"), dtype="float32")
    which.export(str(tmp_path / "out"))
    expected = scores(which, batch)
    for folder in ("engine", "out"):
        names = load_file(tmp_path / folder / "model.safetensors").keys()
        assert names == load_file(Path(path) / "model.safetensors").keys()
        AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        merged = trainer(str(tmp_path / folder), lora=None)
        np.testing.assert_allclose(scores(merged, batch), expected, atol=1e-5)
    assert np.abs(scores(trainer(path, lora=None), batch) - expected).max() > 1e-3
    assert first["changed_share"] is None
    learn(which, batch, 2)
    second = which.write_weights(str(tmp_path / "engine"), dtype="float32")
    assert 0 < second["changed_share"] < 1


def test_a_checkpoint_holds_adapters_only_and_resumes_exactly(
    save_model: Callable[..., str], rng: np.random.Generator, tmp_path: Path
) -> None:
    path, batch = save_model(tiny_llama()), groups(rng)
    which = trainer(path)
    learn(which, batch)
    which.save(str(tmp_path / "state"))
    names = load_file(tmp_path / "state" / "model.safetensors").keys()
    assert names
    assert all("lora_" in name for name in names)
    learn(which, batch, 1)
    resumed = trainer(path)
    resumed.load(str(tmp_path / "state"))
    learn(resumed, batch, 1)
    for first, second in zip(which.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(first, second)
    with pytest.raises(CheckpointError, match="of another model"):
        trainer(path, lora=None).load(str(tmp_path / "state"))


def test_the_reference_is_the_base_with_adapters_off(
    save_model: Callable[..., str], rng: np.random.Generator
) -> None:
    path, batch = save_model(tiny_llama()), groups(rng)
    algorithm = {"kl_coef": 0.1}
    shared, apart = (
        trainer(path, algorithm=algorithm, reference_model=folder) for folder in (None, path)
    )
    for step in range(3):
        ours, theirs = learn(shared, batch, step), learn(apart, batch, step)
        for name in ("loss/total", "policy/reference_kl", "optimizer/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name
    assert ours["policy/reference_kl"] > 1e-4
    assert shared._learner.reference is not None
    assert shared._learner.reference.model is shared._policy.model


@pytest.mark.parametrize("targets", [("lm_head",), ("embed_tokens",), ("nothing_like_this",)])
def test_layers_that_cannot_have_adapters_are_refused(
    targets: tuple[str, ...], save_model: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match="cannot be put"):
        trainer(save_model(tiny_llama()), lora={"target_modules": targets})


def test_a_missing_peft_is_named_with_its_remedy(
    save_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tiny_llama())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"rollmill\[lora\]"):
        trainer(path)


def test_recomputed_activations_reach_the_adapters(
    save_model: Callable[..., str], rng: np.random.Generator
) -> None:
    path, batch = save_model(tiny_llama()), groups(rng)
    plain, saving = trainer(path), trainer(path, activation_checkpointing=True)
    for step in range(2):
        expected, found = learn(plain, batch, step), learn(saving, batch, step)
        assert found["optimizer/grad_norm"] > 0
        assert found["optimizer/grad_norm"] == pytest.approx(expected["optimizer/grad_norm"])
    for first, second in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(first, second)
