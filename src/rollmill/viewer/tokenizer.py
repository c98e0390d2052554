"""What each token says, with the run's own tokenizer; ids alone when it cannot be loaded.

The tokenizer's file is read with `tokenizers` alone: no model code, no torch, nothing downloaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from rollmill.errors import RollmillError
from rollmill.models import resolve_model
from rollmill.viewer.texts import clean
from rollmill.viewer.token_pieces import TokenPieces, id_as_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Texts of some tokens.

    Attributes:
        texts: one per token.
        special: whether the token is one of the tokenizer's special tokens.
    """

    texts: list[str]
    special: list[bool]


class RunTokenizer:
    """The tokenizer that a run used, loaded on first use. Safe to use from several threads.

    Args:
        root: the run folder; a `tokenizer/tokenizer.json` in it is preferred to the model's.
        config: the run's configuration as plain values.
    """

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self._root = root
        self._model: dict[str, Any] = config.get("model") or {}
        self._lock = threading.Lock()

    @property
    def problem(self) -> str | None:
        """Why there are only ids; None when the tokenizer works."""
        with self._lock:
            return self._loaded[1]

    def load(self) -> None:
        """Load it now, so that the first sample need not wait."""
        with self._lock:
            _ = self._loaded

    def texts(self, ids: Sequence[int]) -> TokenTexts:
        """The text of each token; its id in brackets when there is no tokenizer."""
        with self._lock:
            pieces = self._loaded[0]
            if pieces is None:
                return TokenTexts([id_as_text(number) for number in ids], [False] * len(ids))
            texts = [clean(text) for text in pieces.texts(ids)]
            return TokenTexts(texts, [pieces.is_special(number) for number in ids])

    @cached_property
    def _loaded(self) -> tuple[TokenPieces | None, str | None]:
        try:
            return TokenPieces(Tokenizer.from_file(str(self._file()))), None
        # tokenizers raises plain Exceptions for files it cannot read. Policy: show ids, say why.
        except Exception as error:  # noqa: BLE001
            reason = error.what if isinstance(error, RollmillError) else f"{error}"
            logger.warning("no token texts for %s: %s", self._root, reason)
            return None, clean(reason, 500)

    def _file(self) -> Path:
        own = self._root / "tokenizer" / "tokenizer.json"
        if own.is_file():
            return own
        path = self._model.get("tokenizer") or self._model.get("path")
        if not path:
            raise FileNotFoundError("config.yaml names no model")
        named = Path(str(path)).expanduser() / "tokenizer.json"
        file = named if named.is_file() else resolve_model(str(path)) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist")
        return file


def read_config(root: Path) -> dict[str, Any]:
    """The run's configuration as plain values; empty when it cannot be read."""
    try:
        values = yaml.safe_load((root / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return values if isinstance(values, dict) else {}
