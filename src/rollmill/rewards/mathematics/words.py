"""Numbers in words: "twenty-one", "five million", "two thirds", "three and a half", "a dozen"."""

from __future__ import annotations

from fractions import Fraction

SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SMALL_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen"""
_SMALL = {word: number for number, word in enumerate(_SMALL_WORDS.split())}
_TENS_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {word: 10 * number for number, word in enumerate(_TENS_WORDS.split(), start=2)}
_PART_WORDS = "half third quarter fifth sixth seventh eighth ninth tenth"
_PARTS = {
    **{word: number for number, word in enumerate(_PART_WORDS.split(), start=2)},
    **{f"{word}s": number for number, word in enumerate(_PART_WORDS.split(), start=2)},
    **{"halves": 2, "fourth": 4, "fourths": 4},
}
_COUNTED = SCALES.keys() | _PARTS.keys()
MAX_WORDS = 12


def number_in_words(text: str) -> Fraction | None:
    """The number that a text spells as a whole, or None. A part needs a count: "one third"."""
    words = text.lower().replace("-", " ").split()
    if not words or len(words) > MAX_WORDS:
        return None
    is_negative = words[0] in ("minus", "negative")
    value = _unsigned(words[is_negative:])
    return -value if value is not None and is_negative else value


def _unsigned(words: list[str]) -> Fraction | None:
    if words == ["half"]:
        return Fraction(1, 2)
    if words[:1] in (["a"], ["an"]) and not (_COUNTED & set(words[1:2])):
        return None  # the article of a word, or a letter
    if not words or words[-1] not in _PARTS:
        return _whole(words)
    part = _PARTS[words[-1]]
    if "and" in words[:-1]:  # three and a half
        place = len(words) - 1 - words[::-1].index("and")
        whole, top = _whole(words[:place]), _whole(words[place + 1 : -1])
    else:
        whole, top = Fraction(0), _whole(words[:-1])
    return None if whole is None or top is None or top >= part else whole + top / part


def _whole(words: list[str]) -> Fraction | None:
    """An integer; "a" counts as one where it stands alone before a scale or a part."""
    if words[:1] in (["a"], ["an"]):
        words = ["one", *words[1:]]
    total = current = 0
    seen = False
    for word in words:
        if word == "and" and seen:
            continue
        if word in _SMALL or word in _TENS:
            current += _SMALL.get(word, 0) or _TENS.get(word, 0)
        elif word in SCALES and seen:
            if SCALES[word] <= 100:
                current *= SCALES[word]
            else:
                total, current = total + current * SCALES[word], 0
        else:
            return None
        seen = True
    return Fraction(total + current) if seen else None
