"""Instructions of IFBench (arXiv 2507.02833) about words, sentences and counts."""

from __future__ import annotations

import itertools
import re
from collections import Counter

from rollmill.rewards.graders.instructions.texts import (
    Arguments,
    Check,
    count_phrase,
    sentences,
    tokens,
    without_punctuation,
    words,
)

_CONJUNCTIONS = frozenset(["and", "but", "for", "nor", "or", "so", "yet"])
_STOP_WORDS_TEXT = """
i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she
her hers herself it its itself they them their theirs themselves what which who whom this that
these those am is are was were be been being have has had having do does did doing a an the
and but if or because as until while of at by for with about against between into through
during before after above below to from up down in out on off over under again further then
once here there when where why how all any both each few more most other some such no nor not
only own same so than too very s t can will just don should now d ll m o re ve y ain aren
couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn"""
_STOP_WORDS = frozenset(_STOP_WORDS_TEXT.split())
_PRONOUNS_TEXT = """
i me we us you he him she her it they them my mine our ours your yours his hers its their
theirs myself ourselves yourself yourselves himself herself itself themselves this that these
those who whom whose which what whoever whomever whatever whichever anybody anyone anything
everybody everyone everything nobody nothing somebody someone something each either neither
both all some any none"""
_PRONOUNS = frozenset(_PRONOUNS_TEXT.split())
_NAMES_TEXT = """
Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander
Amelia Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel
Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher
Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan"""
_NAMES = frozenset(_NAMES_TEXT.split())
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")


def _plain_words(text: str) -> list[str]:
    return without_punctuation(text.lower()).split()


def _stop_words(text: str, given: Arguments) -> bool:
    found = [word.lower() for word in words(text)]
    share = sum(word in _STOP_WORDS for word in found) / len(found) if found else 1.0
    return bool(share * 100 <= given["percentage"])


def _sentence_types(text: str) -> tuple[int, int, int]:
    ends = Counter(sentence.rstrip("\"'”’)")[-1:] for sentence in sentences(text))
    return ends["."], ends["?"], ends["!"]


def _two_to_one(text: str, given: Arguments) -> bool:
    declarative, interrogative, _ = _sentence_types(text)
    return interrogative > 0 and declarative == 2 * interrogative


def _balanced(text: str, given: Arguments) -> bool:
    counts = _sentence_types(text)
    return counts[0] > 0 and len(set(counts)) == 1


def _conjunctions(text: str, given: Arguments) -> bool:
    return bool(
        len(_CONJUNCTIONS.intersection(t.lower() for t in tokens(text))) >= given["small_n"]
    )


def _person_names(text: str, given: Arguments) -> bool:
    return bool(len(_NAMES.intersection(words(text))) >= given["N"])


def _overlap(text: str, given: Arguments) -> bool:
    def trigrams(of: str) -> set[tuple[str, ...]]:
        pieces = re.findall(r"\w+(?:['’-]\w+)*|[^\w\s]", of)
        return set(zip(pieces, pieces[1:], pieces[2:], strict=False))

    own = trigrams(text)
    shared = len(own & trigrams(given["reference_text"])) / len(own) if own else -1.0
    return bool(abs(shared * 100 - given["percentage"]) <= 2)


def _numbers(text: str, given: Arguments) -> bool:
    return bool(len(re.findall(r"\d+", without_punctuation(text))) == given["N"])


def _alphabet(text: str, given: Arguments) -> bool:
    letters = [word[0] for word in _plain_words(text)]
    return (
        bool(letters)
        and all("a" <= letter <= "z" for letter in letters)
        and all((ord(b) - ord(a)) % 26 == 1 for a, b in itertools.pairwise(letters))
    )


def _three_vowels(text: str, given: Arguments) -> bool:
    return "\n" not in text.strip() and len(set("aeiou").intersection(text.lower())) <= 3


def _consonant_clusters(text: str, given: Arguments) -> bool:
    found = text.lower().split()
    return bool(found) and all(re.search(r"[bcdfghjklmnpqrstvwxyz]{2}", word) for word in found)


def _alliteration(text: str, given: Arguments) -> bool:
    previous = -1
    for sentence in sentences(text):
        initials = [token[0].lower() for token in tokens(sentence)]
        runs = (len(list(group)) for _, group in itertools.groupby(initials))
        longest = sum(run for run in runs if run > 1)
        if longest <= previous:
            return False
        previous = longest
    return previous >= 0


def _palindromes(text: str, given: Arguments) -> bool:
    return sum(len(w) >= 5 and w == w[::-1] for w in _plain_words(text)) >= 10


def _prime_lengths(text: str, given: Arguments) -> bool:
    lengths = {len(word) for word in without_punctuation(text).split()}
    return bool(lengths) and all(
        n > 1 and all(n % k for k in range(2, int(n**0.5) + 1)) for n in lengths
    )


def _three_equal_sentences(text: str, given: Arguments) -> bool:
    found = sentences(text)
    used = _plain_words(text)
    return len(found) == 3 and len({len(s) for s in found}) == 1 and len(used) == len(set(used))


def _japanese(text: str, given: Arguments) -> bool:
    step = int(given["N"])
    picked = [piece for piece in text.split()[step - 1 :: step] if not piece.isdigit()]
    return all(_JAPANESE.search(piece) for piece in picked)


def _repeats(text: str, given: Arguments) -> bool:
    return bool(max(Counter(_plain_words(text)).values(), default=0) <= given["small_n"])


def _sentence_keyword(text: str, given: Arguments) -> bool:
    found = sentences(text)
    place = int(given["N"])
    return len(found) >= place and count_phrase(found[place - 1], given["word"]) > 0


def _pronouns(text: str, given: Arguments) -> bool:
    found = re.findall(r"[a-z]+", text.lower())
    return bool(sum(word in _PRONOUNS for word in found) >= given["N"])


def _last_first(text: str, given: Arguments) -> bool:
    found = [[token.lower() for token in tokens(sentence)] for sentence in sentences(text)]
    return all(found) and all(a[-1] == b[0] for a, b in itertools.pairwise(found))


def _paragraph_last_first(text: str, given: Arguments) -> bool:
    found = [[token.lower() for token in tokens(line)] for line in text.splitlines()]
    return all(pieces[0] == pieces[-1] for pieces in found if pieces)


def _increment(text: str, given: Arguments) -> bool:
    counts = [len(without_punctuation(sentence).split()) for sentence in sentences(text)]
    return bool(counts) and all(b - a == given["small_n"] for a, b in itertools.pairwise(counts))


def _no_consecutive(text: str, given: Arguments) -> bool:
    return all(a[0] != b[0] for a, b in itertools.pairwise(_plain_words(text)))


def _keywords_multiple(text: str, given: Arguments) -> bool:
    return all(
        count_phrase(text, given[f"keyword{k}"]) == count
        for k, count in enumerate((1, 2, 3, 5, 7), start=1)
    )


def _keyword_position(text: str, given: Arguments) -> bool:
    found = sentences(text)
    if len(found) < given["n"]:
        return False
    pieces = tokens(found[given["n"] - 1])
    wanted = given["keyword"].strip().lower()
    return bool(len(pieces) >= given["m"] and pieces[given["m"] - 1].lower() == wanted)


def _words_position(text: str, given: Arguments) -> bool:
    pieces = [token.lower() for token in tokens(text)]
    wanted = given["keyword"].strip().lower()
    return len(pieces) > 1 and pieces[1] == pieces[-2] == wanted


def _word_count_range(text: str, given: Arguments) -> bool:
    return bool(given["min_words"] <= len(words(text)) <= given["max_words"])


def _unique_words(text: str, given: Arguments) -> bool:
    return bool(len({token.lower() for token in tokens(text)}) >= given["N"])


CHECKS: dict[str, Check] = {
    "count:word_count_range": _word_count_range,
    "count:unique_word_count": _unique_words,
    "count:conjunctions": _conjunctions,
    "count:person_names": _person_names,
    "count:numbers": _numbers,
    "count:words_japanese": _japanese,
    "count:pronouns": _pronouns,
    "count:keywords_multiple": _keywords_multiple,
    "ratio:stop_words": _stop_words,
    "ratio:sentence_type": _two_to_one,
    "ratio:sentence_balance": _balanced,
    "ratio:overlap": _overlap,
    "ratio:sentence_words": _three_equal_sentences,
    "words:alphabet": _alphabet,
    "words:vowel": _three_vowels,
    "words:consonants": _consonant_clusters,
    "words:palindrome": _palindromes,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:no_consecutive": _no_consecutive,
    "words:keywords_specific_position": _keyword_position,
    "words:words_position": _words_position,
    "sentence:alliteration_increment": _alliteration,
    "sentence:keyword": _sentence_keyword,
    "sentence:increment": _increment,
}
"""Instruction id to check."""
