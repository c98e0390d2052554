"""Who is who: hashes of weights and tokenizers that do not depend on how files are cut.

Distillation compares log-probs of several models over one vocabulary, long after some of them ran.
Names and paths do not prove that two of them are the same model; these hashes do. A folder that
`save_pretrained` wrote in other shards has the same hash; other weights, or the same weights in
another precision, have another.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollmill.errors import ModelError

PROBES = (
    "Hello, world!",
    "  two  spaces\tand a tab\n\n",
    "3.14159 = pi; 2^10 = 1024",
    "naïve café — “quotes” … 你好 🙂",
    "def f(x):\n    return x ** 2\n",
    "UPPER lower MiXeD 0123456789",
)
"""Texts that two tokenizers must cut alike: a vocabulary does not tell how text is split."""

_HEADER_BYTES = 8


@dataclass(frozen=True)
class TokenizerIdentity:
    """Hashes of the parts of a tokenizer.

    Attributes:
        vocabulary: every token with its id.
        merges: the merge rules (or piece scores) in order; of nothing where there are none.
        special_ids: names and ids of the special tokens.
        template: the chat template.
        probes: how `PROBES` are cut.
    """

    vocabulary: str
    merges: str
    special_ids: str
    template: str
    probes: str

    def differences(self, other: TokenizerIdentity) -> list[str]:
        """Names of the parts in which the two differ."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if mine[name] != theirs[name]]


def weights_hash(folder: Path) -> str:
    """`sha256:…` over names, types, shapes and bytes of all tensors in a folder's safetensors.

    Raises:
        ModelError: there are none, or a file is damaged.
    """
    digest = hashlib.sha256()
    tensors = sorted(
        (name, entry, file)
        for file in sorted(folder.glob("*.safetensors"))
        for name, entry in _tensor_entries(file)
    )
    if not tensors:
        raise ModelError(
            "the model folder has no safetensors weights",
            where=str(folder),
            fix="load it with transformers once and call save_pretrained",
        )
    for name, (dtype, shape, start, stop), file in tensors:
        digest.update(json.dumps([name, dtype, shape]).encode())
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as data:
            view = memoryview(data)[start:stop]
            digest.update(view)
            view.release()
    return f"sha256:{digest.hexdigest()}"


def tokenizer_identity(tokenizer: Any) -> TokenizerIdentity:
    """The hashes of a transformers tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    rules = model.get("merges") or (model.get("vocab") if model.get("type") == "Unigram" else [])
    specials = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    return TokenizerIdentity(
        vocabulary=_hash(sorted(tokenizer.get_vocab().items())),
        merges=_hash(rules),
        special_ids=_hash([sorted(specials.items()), sorted(tokenizer.all_special_ids)]),
        template=_hash(tokenizer.chat_template or ""),
        probes=_hash([tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBES]),
    )


def _tensor_entries(file: Path) -> Iterator[tuple[str, tuple[str, list[int], int, int]]]:
    """(name, (dtype, shape, first byte, end)) of each tensor in a safetensors file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_BYTES), "little")
            base, size = _HEADER_BYTES + length, file.stat().st_size
            if base > size:  # a pointer of Git LFS says so, in eight letters of its text
                raise ValueError(f"the header ends at byte {base} of {size}")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                if base + stop > size:
                    raise ValueError(f"{name} ends at byte {base + stop} of {size}")
                yield name, (entry["dtype"], entry["shape"], base + start, base + stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            "a weights file cannot be read",
            where=str(file),
            expected="a safetensors file",
            found=f"{type(error).__name__}: {error}",
            fix="copy the model folder again (with Git LFS: git lfs pull)",
        ) from error


def _hash(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
