"""Generate functions: two turns with a tool, and fan-out."""

import re

from rollmill.sample import Status


def calculate(text):
    """The tool: the sum when the text ends with `<sum>1+2</sum>`, or None."""
    asked = re.search(r"<sum>([\d+ ]+)</sum>\s*$", text)
    return None if asked is None else str(sum(map(int, re.findall(r"\d+", asked.group(1)))))


async def with_calculator(sample, context):
    """The model may ask for sums; results go into its context and never into the loss."""
    for _ in range(4):
        await context.extend(sample)
        result = calculate(sample.response) if sample.status is Status.COMPLETED else None
        if result is None:
            return sample
        tokens = context.tokenizer([f" {result} "], add_special_tokens=False)["input_ids"][0]
        if context.budget(sample) <= len(tokens):
            sample.status = Status.TRUNCATED
            return sample
        context.append_environment(sample, tokens)
    return sample


async def answer_and_check(sample, context):
    """Fan-out: the answer, and a second sample of the same attempt that answers once more.

    Both are trained on and count as one attempt. A sample that comes with segments was cut off by
    the end of a batch: it is gone on with alone.
    """
    is_known = sample.segments or "sibling" in sample.metadata
    await context.extend(sample)
    if is_known or sample.status is Status.ABORTED:
        return sample
    second = context.sibling(sample)
    await context.extend(second)
    return [sample, second]
