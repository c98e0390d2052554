"""Noticing that engines hardly change: half precision rounds small updates of the weights away.

The trainer's master weights are float32, so nothing is lost: an update reaches the engines once
enough of them have added up. Until then answers are written by slightly older weights than their
version says, which the trainer sees as a difference of log-probs.
"""

from __future__ import annotations

LOW_SHARE = 0.01
"""Share of changed weights below which a sync is told about."""
AGAIN = 0.5
"""It is told about again when the share has fallen to this part of what was told last."""
_HALF = ("bfloat16", "float16")


class SwallowWatch:
    """A pure state machine: it is told what each sync changed and answers with a warning, or none.

    Args:
        dtype: precision that the engines serve.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._told: float | None = None

    def update(self, changed_share: float | None) -> str | None:
        """The warning for a sync that changed this share of the weights (None: not known)."""
        if changed_share is None or self._dtype not in _HALF or changed_share >= LOW_SHARE:
            return None
        if self._told is not None and changed_share > AGAIN * self._told:
            return None
        self._told = changed_share
        return (
            f"only {changed_share:.2%} of the engines' {self._dtype} weights changed: smaller "
            "updates wait until they add up. Serve float32, or set importance_correction: truncate"
        )
