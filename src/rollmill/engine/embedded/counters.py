"""What the engine has done since its start, for `/metrics` and `/v1/loads`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since start; written by the model's thread."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    aborted: int = 0
    steps: int = 0
    busy_s: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=32))
    """Time and generated tokens of the last steps."""

    def throughput(self) -> float:
        """Generated tokens per second over the last steps; 0 when idle."""
        recent = list(self.recent)
        if len(recent) < 2 or time.monotonic() - recent[-1][0] > 5.0:
            return 0.0
        return sum(n for _, n in recent[1:]) / max(recent[-1][0] - recent[0][0], 1e-9)
