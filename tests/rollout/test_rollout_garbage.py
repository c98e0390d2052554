"""The process's garbage collection while batches are collected, and afterwards."""

import gc

from rollmill.rollout.garbage import NEVER, only_small_collections


def test_batches_that_overlap_leave_the_thresholds_as_the_first_one_found_them() -> None:
    before = gc.get_threshold()
    first, second = only_small_collections(), only_small_collections()

    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[1:] == (NEVER, NEVER), "the second one goes on"
    second.__exit__(None, None, None)

    assert gc.get_threshold() == before
