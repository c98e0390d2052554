"""The instructions of IFEval (arXiv 2311.07911), with its ids and argument names."""

from __future__ import annotations

import json
import re

from rollmill.rewards.graders.instructions.texts import (
    Arguments,
    Check,
    compares,
    count_phrase,
    paragraphs,
    sentences,
    words,
)

_SCRIPTS = {
    "ru": "\u0400-\u04ff", "bg": "\u0400-\u04ff", "uk": "\u0400-\u04ff", "ar": "\u0600-\u06ff",
    "fa": "\u0600-\u06ff", "ur": "\u0600-\u06ff", "hi": "\u0900-\u097f", "mr": "\u0900-\u097f",
    "ne": "\u0900-\u097f", "bn": "\u0980-\u09ff", "pa": "\u0a00-\u0a7f", "gu": "\u0a80-\u0aff",
    "ta": "\u0b80-\u0bff", "te": "\u0c00-\u0c7f", "kn": "\u0c80-\u0cff", "ml": "\u0d00-\u0d7f",
    "th": "\u0e00-\u0e7f", "ko": "\uac00-\ud7af", "ja": "\u3040-\u30ff", "zh": "\u4e00-\u9fff",
    "he": "\u0590-\u05ff", "el": "\u0370-\u03ff",
}  # fmt: skip


def _keywords_exist(text: str, given: Arguments) -> bool:
    return all(count_phrase(text, keyword) > 0 for keyword in given["keywords"])


def _keyword_frequency(text: str, given: Arguments) -> bool:
    return compares(count_phrase(text, given["keyword"]), given.get("relation"), given["frequency"])


def _forbidden_words(text: str, given: Arguments) -> bool:
    return not any(count_phrase(text, word) for word in given["forbidden_words"])


def _letter_frequency(text: str, given: Arguments) -> bool:
    count = text.lower().count(given["letter"].lower())
    return compares(count, given.get("let_relation"), given["let_frequency"])


def _language(text: str, given: Arguments) -> bool:
    script = _SCRIPTS.get(given["language"])
    if script is None:
        raise ValueError(f"telling {given['language']!r} from other languages is not supported")
    letters = [c for c in text if c.isalpha()]
    native = re.findall(
        f"[{script}\u4e00-\u9fff]" if given["language"] == "ja" else f"[{script}]", text
    )
    return bool(letters) and len(native) > len(letters) / 2


def _number_of_sentences(text: str, given: Arguments) -> bool:
    return compares(len(sentences(text)), given.get("relation"), given["num_sentences"])


def _number_of_paragraphs(text: str, given: Arguments) -> bool:
    return bool(len(paragraphs(text, r"\s*\*\*\*\s*")) == given["num_paragraphs"])


def _number_of_words(text: str, given: Arguments) -> bool:
    return compares(len(words(text)), given.get("relation"), given["num_words"])


def _nth_paragraph_first_word(text: str, given: Arguments) -> bool:
    parts = paragraphs(text)
    place = given["nth_paragraph"]
    if len(parts) != given["num_paragraphs"] or not 1 <= place <= len(parts):
        return False
    found = words(parts[place - 1])
    return bool(found) and found[0].lower() == given["first_word"].strip().lower()


def _placeholders(text: str, given: Arguments) -> bool:
    return bool(len(re.findall(r"\[[^\[\]]+\]", text)) >= given["num_placeholders"])


def _postscript(text: str, given: Arguments) -> bool:
    marker = re.sub(r"\s+", "", given["postscript_marker"].lower())
    pattern = r"\s*".join(map(re.escape, marker))
    return re.search(rf"(?m)^\s*[*_]*{pattern}", text.lower()) is not None


def _bullets(text: str, given: Arguments) -> bool:
    found = re.findall(r"(?m)^\s*(?:\*(?!\*)|-|•)\s*\S", text)
    return bool(len(found) == given["num_bullets"])


def _constrained_response(text: str, given: Arguments) -> bool:
    options = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    return text.strip() in options


def _highlights(text: str, given: Arguments) -> bool:
    bold = re.findall(r"\*\*[^*\n]*\S[^*\n]*\*\*", text)
    single = re.findall(r"(?<!\*)\*(?!\s)[^*\n]+\*(?!\*)", re.sub(r"\*\*[^*\n]*\*\*", "", text))
    return bool(len(bold) + len(single) >= given["num_highlights"])


def _sections(text: str, given: Arguments) -> bool:
    marker = re.escape(given["section_spliter"].strip())
    return bool(len(re.findall(rf"(?:^|\s|[*#]){marker}\s*\d+", text)) >= given["num_sections"])


def _json(text: str, given: Arguments) -> bool:
    body = re.sub(r"^\s*```(?:json)?\s*\n|\n?\s*```\s*$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, given: Arguments) -> bool:
    return re.search(r"<<[^<>\n]*\S[^<>\n]*>>", text) is not None


def _two_responses(text: str, given: Arguments) -> bool:
    parts = text.split("******")
    answers = [part.strip() for part in parts]
    return len(answers) == 2 and all(answers) and answers[0] != answers[1]


def _repeat_prompt(text: str, given: Arguments) -> bool:
    return text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


def _end_phrase(text: str, given: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def _capital_words(text: str, given: Arguments) -> bool:
    count = sum(word.isupper() and any(c.isalpha() for c in word) for word in words(text))
    return compares(count, given.get("capital_relation"), given["capital_frequency"])


def _has_letters(text: str) -> bool:
    return any(c.isalpha() for c in text)


CHECKS: dict[str, Check] = {
    "keywords:existence": _keywords_exist,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": _number_of_sentences,
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:number_words": _number_of_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_phrase,
    "startend:quotation": lambda text, given: (
        len(text.strip()) > 1 and text.strip()[0] == '"' == text.strip()[-1]
    ),
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text, given: _has_letters(text) and text == text.upper(),
    "change_case:english_lowercase": lambda text, given: (
        _has_letters(text) and text == text.lower()
    ),
    "punctuation:no_comma": lambda text, given: not re.search("[,，]", text),
}
"""Instruction id to check."""
