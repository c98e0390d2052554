"""A data source: prompts made up on the way, here additions that get longer."""

import base64

from rollmill.sample import Group, Sample, int_array
from rollmill.sample_codec import decode_group, encode_group


class Additions:
    """Prompt k asks for a sum of 2 + k // 100 numbers."""

    def __init__(self, context):
        self._context = context
        self._num_groups = 0
        self._num_samples = 0
        self._waiting = []

    def __len__(self):
        return 100  # prompts of one difficulty

    def take(self, n):
        """Unfinished groups first, then new ones."""
        self._waiting.sort(key=lambda group: group.group_index)
        old, self._waiting = self._waiting[:n], self._waiting[n:]
        return old + [self._fresh() for _ in range(n - len(old))]

    def give_back(self, groups):
        """Unfinished groups, tokens and all."""
        self._waiting += groups

    def new_index(self):
        """A sample index that was never used."""
        self._num_samples += 1
        return self._num_samples - 1

    def state_dict(self):
        """The position as JSON values: goes into every checkpoint."""
        waiting = [base64.b64encode(encode_group(group)).decode() for group in self._waiting]
        return {"groups": self._num_groups, "samples": self._num_samples, "waiting": waiting}

    def load_state_dict(self, state):
        """Go back to a position."""
        self._num_groups, self._num_samples = state["groups"], state["samples"]
        self._waiting = [decode_group(base64.b64decode(text)) for text in state["waiting"]]

    def _fresh(self):
        number = self._num_groups
        self._num_groups += 1
        terms = [(number * 7 + 3 * i) % 50 for i in range(2 + number // 100)]
        prompt = " + ".join(map(str, terms)) + " ="
        tokens = int_array(self._context.tokenizer([prompt])["input_ids"][0])
        samples = [
            Sample(tokens, self.new_index(), number, attempt, prompt, str(sum(terms)))
            for attempt in range(self._context.n_samples_per_prompt)
        ]
        return Group(number, samples)


def additions(context):
    """`rollout.hooks.data_source`."""
    return Additions(context)
