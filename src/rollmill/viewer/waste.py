"""Where the generated tokens of a run went, summed over its steps."""

from __future__ import annotations

import sys
from typing import Any

from rollmill.viewer.metrics_index import MetricsIndex

GENERATED = "rollout/generated_tokens"
WASTED = "rollout/wasted_tokens"
TRAINED = "train/tokens/trained"
SKIPPED = "train/tokens/skipped"
POSITIONS = "train/tokens/positions"
PADDING_SHARE = "train/tokens/padding_share"
LENGTH_BIAS = "rollout/length_bias"
"""Mean length of answers trained on over that of answers issued, so far; 1 is no bias."""


def token_report(metrics: MetricsIndex) -> dict[str, Any]:
    """Tokens generated, trained on, without influence, thrown away (by reason) and padded.

    `kept` tokens are in answers that no step has used yet, or that were taken out of the loss.
    `skipped` tokens were in a batch, but with an advantage of 0 and no other term in the loss.
    `padding` counts positions that the trainer computed for nothing; it is no part of `generated`.
    """
    reasons = [name for name in metrics.names() if name.startswith(f"{WASTED}/")]
    wanted = [GENERATED, WASTED, TRAINED, SKIPPED, POSITIONS, PADDING_SHARE, *reasons]
    curves = metrics.curves(wanted, sys.maxsize)
    totals = {name: float(curve.y.sum()) for name, curve in curves.items()}
    positions, share = curves.get(POSITIONS), curves.get(PADDING_SHARE)
    is_paired = positions is not None and share is not None and len(positions.y) == len(share.y)
    padding = float(positions.y @ share.y) if is_paired and positions and share else None
    used = sum(totals.get(name, 0.0) for name in (TRAINED, SKIPPED, WASTED))
    return {
        "generated": totals.get(GENERATED),
        "kept": max(0.0, totals[GENERATED] - used) if GENERATED in totals else None,
        "trained": totals.get(TRAINED),
        "skipped": totals.get(SKIPPED),
        "wasted": totals.get(WASTED),
        "wasted_by_reason": {
            name.removeprefix(f"{WASTED}/"): totals[name] for name in reasons if totals[name]
        },
        "padding": padding,
        "positions": totals.get(POSITIONS),
    }
