"""One seed per engine call, from what the call is and nothing else."""

from __future__ import annotations

import hashlib

from rollmill.sample import Sample


def call_seed(run_seed: int, sample: Sample, call: int, scope: str = "train") -> int:
    """Seed of a sample's `call`-th engine call: 63 bits, the same in every run.

    It depends on the run's seed, the group, the attempt and the call, so no two calls share a
    random stream and concurrency cannot change one. `scope` keeps evaluation sets apart.
    """
    text = f"{scope}|{run_seed}|{sample.group_index}|{sample.attempt}|{call}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
