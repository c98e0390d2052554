"""A trainer that learns nothing and remembers everything it was given, in its checkpoints too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollmill.sample_codec import decode_group


class StubTrainer:
    def __init__(self) -> None:
        self.trained: list[list[int]] = []

    def train(self, groups: list[bytes], **_: Any) -> dict[str, float]:
        for group in map(decode_group, groups):
            for sample in group.samples:
                self.trained.append([sample.group_index, sample.attempt, sample.metadata["row"]])
        return {}

    def sample_reports(self) -> list[dict[str, Any]]:
        return []

    def write_weights(self, path: str, dtype: str) -> dict[str, Any]:
        Path(path, "model.safetensors").write_bytes(b"made up")
        return {"num_bytes": 7}

    def save(self, path: str) -> None:
        Path(path, "trained.json").write_text(json.dumps(self.trained))

    def load(self, path: str) -> None:
        self.trained = json.loads(Path(path, "trained.json").read_text())
