"""Functions that replace a whole part: collecting a batch, and the evaluation."""

import asyncio


async def two_at_a_time(context):
    """`rollout.hooks.rollout`: takes two prompts at a time until the batch is full of answers.

    Groups that are taken and not returned are booked as rejected (finished) or go back to the
    source (unfinished).
    """
    batch = []
    while len(batch) < context.batch_size:
        groups = await asyncio.gather(*(context.answer(group) for group in context.take(2)))
        batch += [group for group in groups if not group.has_failed]
    return batch[: context.batch_size]


async def one_set_after_the_other(context):
    """`rollout.hooks.evaluation`: one set at a time, and the mean over all sets."""
    metrics = {}
    for name in context.sets:
        metrics |= context.metrics(name, await context.answer(name))
    names = [f"eval/{name}/reward" for name in context.sets]
    rewards = [metrics[name] for name in names if name in metrics]  # none where all answers failed
    if rewards:
        metrics["eval/all/reward"] = sum(rewards) / len(rewards)
    return metrics
