"""Parts of a weighted sum: each judges one thing and knows nothing of the others."""


def shows_work(sample):
    """1 when something stands before the box."""
    before, box, _ = sample.response.rpartition("\\boxed")
    return float(bool(box) and len(before.split()) >= 5)


def brevity(sample):
    """1 for an empty answer, falling to 0 at `metadata.max_words` words (100 if not given)."""
    allowed = sample.metadata.get("max_words", 100)
    return max(0.0, 1.0 - len(sample.response.split()) / allowed)
