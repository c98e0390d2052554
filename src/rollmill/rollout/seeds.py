"""One seed per engine call, from what the call is and nothing else."""

from __future__ import annotations

import hashlib

from rollmill.sample import Sample

SIBLING_KEY = "sibling"
"""Metadata of a fan-out sibling: which one of its attempt it is."""
NUM_SIBLINGS_KEY = "num_siblings"
"""Metadata of a sample: how many siblings it was given so far."""


def call_seed(run_seed: int, sample: Sample, call: int, scope: str = "train") -> int:
    """Seed of a sample's `call`-th engine call: 63 bits, the same in every run.

    It depends on the run's seed, the group, the attempt, the fan-out sibling and the call, so no
    two calls share a random stream and concurrency cannot change one. `scope` keeps evaluation
    sets apart.
    """
    sibling = sample.metadata.get(SIBLING_KEY, "")
    text = f"{scope}|{run_seed}|{sample.group_index}|{sample.attempt}|{sibling}|{call}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
