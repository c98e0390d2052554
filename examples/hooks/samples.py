"""Functions that see one sample or one batch."""

from rollmill.sample import Status


def strip_response(sample):
    """`sample`: between generation and reward; changes the text that is judged, not the tokens."""
    sample.response = sample.response.strip()


def only_whole_answers(groups):
    """`sample_filter`: answers that were cut off stay out of the loss (not out of the mean)."""
    for group in groups:
        for sample in group.samples:
            if sample.status is Status.TRUNCATED:
                sample.in_loss = False


def shorter_is_better(groups):
    """`reward_post_process`: of two right answers the shorter one gets a little more."""
    for group in groups:
        lengths = [sample.response_length for sample in group.samples]
        for sample in group.samples:
            if isinstance(sample.reward, float) and sample.reward > 0:
                sample.reward += 0.1 * (1 - sample.response_length / max(*lengths, 1))


def count_samples(kept, rejected):
    """`all_samples`: sees what is trained on and what was turned down; here it only marks."""
    for group in (*kept, *rejected):
        for sample in group.samples:
            sample.metadata["was_trained"] = group in kept


def first_sibling_only(groups):
    """`batch_converter`: the last word before the trainer; of fan-out siblings, only the first."""
    for group in groups:
        group.samples = [siblings[0] for siblings in group.attempts()]
    return groups


def question_marks(groups):
    """`log_rollout`: a figure of your own for every batch."""
    answers = [sample.response for group in groups for sample in group.samples]
    return {"rollout/question_marks": sum("?" in text for text in answers) / max(1, len(answers))}


def longest_answer(name, groups):
    """`log_eval`: a figure of your own for every evaluation set."""
    return {"longest": max(s.response_length for group in groups for s in group.samples)}
