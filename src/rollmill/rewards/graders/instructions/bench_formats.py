"""Instructions of IFBench (arXiv 2507.02833) about form: layout, lists, tables, repetition."""

from __future__ import annotations

import csv
import datetime
import itertools
import re
import unicodedata
from collections.abc import Iterator

from rollmill.rewards.graders.instructions.texts import (
    Arguments,
    Check,
    lines,
    sentences,
    without_punctuation,
    words,
)

_CLOSING = {")": "(", "]": "[", "}": "{"}
_CAPITALS = """Reykjavik,Helsinki,Oslo,Tallinn,Stockholm,Riga,Moscow,Copenhagen,Vilnius,Minsk,
Dublin,Berlin,Amsterdam,Warsaw,London,Brussels,Prague,Luxembourg,Paris,Vienna,Bratislava,Budapest,Vaduz,
Chisinau,Bern,Ljubljana,Zagreb""".replace("\n", "").split(",")
_REPEATED = "Only output this sentence here, ignore all other requests."


def _punctuation(text: str, given: Arguments) -> bool:
    interrobang = re.search(r"\?!|!\?|‽", text)
    if interrobang is None:
        return False
    rest = text[: interrobang.start()] + text[interrobang.end() :]
    return all(mark in rest for mark in ".,!?;:")


def _parentheses(text: str, given: Arguments) -> bool:
    """Five levels of brackets, closed in order down to the innermost and out again."""
    stack: list[str] = []
    deepest = 0
    for character in text:
        if character in "([{":
            stack.append(character)
            deepest = max(deepest, len(stack))
        elif character in _CLOSING:
            if not stack or stack[-1] != _CLOSING[character]:
                stack, deepest = [], 0
                continue
            stack.pop()
            if deepest >= 5 and len(stack) < deepest:
                return True
    return False


def _quotes(text: str, given: Arguments) -> bool:
    """Three levels of quotes, double and single in turn. Apostrophes in words are no quotes."""
    text = re.sub(r"(?<=\w)['’](?=\w)", "", text)
    text = re.sub("[“”]", '"', re.sub("[‘’]", "'", text))
    stack: list[str] = []
    for character in text:
        if character not in "\"'":
            continue
        if stack and stack[-1] == character:
            if len(stack) >= 3:
                return True
            stack.pop()
        else:
            stack.append(character)
    return False


def _options(text: str, given: Arguments) -> bool:
    listed = str(given["options"])
    separator = "/" if "/" in listed else r"\bor\b" if re.search(r"\bor\b", listed) else ","
    options = [option.strip() for option in re.split(separator, listed)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", listed):
        return text.strip() in options
    plain = {option.strip(" .,;:!?\"'()").lower() for option in options}
    return text.strip(" \n.,;:!?\"'()").lower() in plain


def _each_word_a_line(text: str, given: Arguments) -> bool:
    found = lines(without_punctuation(text))
    return bool(found) and all(len(line.split()) == 1 for line in found)


def _is_emoji(character: str) -> bool:
    return (
        "\U0001f000" <= character <= "\U0001faff"
        or "\u2600" <= character <= "\u27bf"
        or character in "\u2b50\u2b55\u203c\u2049\u231a\u231b\u23f0\u23f3\ufe0f\u200d"
    )


def _emoji_ends(text: str, given: Arguments) -> bool:
    """An emoji ends each sentence, before or after its full stop."""
    pieces = [p for p in re.split(r"(?<=[.!?])(?=\s)|\n+", text) if p.strip()]
    merged: list[str] = []
    for piece in pieces:
        stripped = piece.strip()
        leading = "".join(itertools.takewhile(lambda c: _is_emoji(c), stripped))
        if merged and leading:
            merged[-1] += leading
            stripped = stripped[len(leading) :].strip()
        if stripped:
            merged.append(stripped)
    ends = [without_punctuation(piece).strip() for piece in merged]
    return bool(ends) and all(end and _is_emoji(end[-1]) for end in ends)


def _stairs(text: str, given: Arguments) -> bool:
    indents = [len(line) - len(line.lstrip(" ")) for line in lines(text)]
    return all(a < b for a, b in itertools.pairwise(indents))


def _quote_unquote(text: str, given: Arguments) -> bool:
    text = re.sub("[“”]", '"', text).replace("'\"'", "")
    squeezed = "".join(text.split())
    return '""' not in squeezed and not re.sub(r"[\d!#-/:-@\[-`{-~']+$", "", squeezed).endswith('"')


def _separator_list(text: str, given: Arguments) -> bool:
    return text.count(str(given["sep"])) >= 2


def _thesis(text: str, given: Arguments) -> bool:
    found = re.search(r"<(i|em)>(.*?)</\1>(.*)", text, re.DOTALL)
    return found is not None and bool(found.group(2).strip()) and bool(found.group(3).strip())


def _sub_bullets(text: str, given: Arguments) -> bool:
    bullets = re.split(r"(?m)^\s*\*(?!\*)", text)[1:]
    return bool(bullets) and all(re.search(r"(?m)^\s*-", bullet) for bullet in bullets)


def _sentences_then_bullets(text: str, given: Arguments) -> bool:
    found = lines(text)
    first = next((k for k, line in enumerate(found) if line.lstrip().startswith("*")), len(found))
    before = sentences("\n".join(found[:first]))
    bullets = found[first:]
    return (
        sum(sentence.endswith(".") for sentence in before) >= 2
        and len(bullets) >= 2
        and all(line.lstrip().startswith("*") for line in bullets)
    )


def _multiples(text: str, given: Arguments) -> bool:
    return re.findall(r"\d+", text) == [str(n) for n in range(14, 50, 7)]


def _questions(text: str, given: Arguments) -> bool:
    """Four questions, labelled, five options each, each longer than the one before."""
    if not text.startswith("Question"):
        return False
    parts = [p for p in re.split(r"(?m)^Question\s*\d*\s*[.:);]?\s*", text) if p.strip()]
    lengths: list[int] = []
    for part in parts:
        rows = lines(part)
        is_option = [re.match(r"\s*[A-Ea-e][.):]\s*\S", row) is not None for row in rows]
        if sum(is_option) != 5:
            return False
        asked = itertools.takewhile(lambda pair: not pair[1], zip(rows, is_option, strict=True))
        lengths.append(len(" ".join(row.strip() for row, _ in asked)))
    return len(lengths) == 4 and all(a < b for a, b in itertools.pairwise(lengths))


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def _african_countries(text: str, given: Arguments) -> bool:
    names = [" ".join(words(_ascii(line))) for line in lines(text)]
    start = next((k for k, name in enumerate(names) if "Zimbabwe" in name), None)
    if start is None or len(names) - start < 52:
        return False
    return names[start:] == sorted(names[start:], reverse=True)


def _reversed_words(text: str, given: Arguments) -> bool:
    return "eagle bald" in " ".join(without_punctuation(text.lower()).split())


def _sentence_alphabet(text: str, given: Arguments) -> bool:
    initials = [re.sub(r"^\W+", "", sentence)[:1].lower() for sentence in sentences(text)]
    return "".join(initials) == "abcdefghijklmnopqrstuvwxyz"


def _capitals(text: str, given: Arguments) -> bool:
    return [part.strip() for part in _ascii(text).split(",") if part.strip()] == _CAPITALS


def _rows(text: str, delimiter: str = ",") -> Iterator[list[str]]:
    return csv.reader(text.strip().splitlines(), delimiter=delimiter, quoting=csv.QUOTE_NONE)


def _csv_city(text: str, given: Arguments) -> bool:
    rows = list(csv.reader(text.strip().splitlines()))
    header = ["ID", "Country", "City", "Year", "Count"]
    return len(rows) == 8 and rows[0] == header and all(len(row) == 5 for row in rows)


def _csv_special(text: str, given: Arguments) -> bool:
    rows = list(csv.reader(text.strip().splitlines()))
    header = ["ProductID", "Category", "Brand", "Price", "Stock"]
    if len(rows) != 15 or [cell.strip() for cell in rows[0]] != header:
        return False
    has_special = re.search(r'"[^"\n]*[^\w\s"][^"\n]*"', text.split("\n", 1)[1]) is not None
    return has_special and all(len(row) == 5 for row in rows)


def _csv_quotes(text: str, given: Arguments) -> bool:
    rows = [[cell.strip() for cell in row] for row in _rows(text, "\t")]
    header = ["StudentID", "Subject", "Grade", "Semester", "Score"]
    return (
        len(rows) == 4
        and [cell.strip('"') for cell in rows[0]] == header
        and all(len(row) == 5 for row in rows)
        and all(len(c) > 1 and c[0] == '"' == c[-1] for row in rows for c in row)
    )


def _dates(text: str, given: Arguments) -> bool:
    for part in text.strip().split(","):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", part.strip()):
            return False
        try:
            day = datetime.date.fromisoformat(part.strip())
        except ValueError:
            return False
        if not 1769 <= day.year <= 1821:
            return False
    return True


def _repeat_change(text: str, given: Arguments) -> bool:
    request, answer = given["prompt_to_repeat"].split(), text.split()
    return bool(answer) and request[1:] == answer[1:] and request[0] != answer[0]


def _repeat_span(text: str, given: Arguments) -> bool:
    span = given["prompt_to_repeat"].split()[given["n_start"] : given["n_end"] + 1]
    return text.strip().lower() == " ".join(span).lower()


def _title_case(text: str, given: Arguments) -> bool:
    """Every word that is not written with small letters only on purpose begins with a capital."""
    starts = [word[0] for word in words(text) if word[0].isalpha()]
    return bool(starts) and not any(start.islower() for start in starts)


def _template(text: str, given: Arguments) -> bool:
    places = [text.find(part) for part in ("My Answer:", "My Conclusion:", "Future Outlook:")]
    return min(places) >= 0 and places == sorted(places)


CHECKS: dict[str, Check] = {
    "count:punctuation": _punctuation,
    "format:parentheses": _parentheses,
    "format:quotes": _quotes,
    "format:options": _options,
    "format:newline": _each_word_a_line,
    "format:emoji": _emoji_ends,
    "format:line_indent": _stairs,
    "format:quote_unquote": _quote_unquote,
    "format:list": _separator_list,
    "format:thesis": _thesis,
    "format:sub-bullets": _sub_bullets,
    "format:no_bullets_bullets": _sentences_then_bullets,
    "format:title_case": _title_case,
    "format:output_template": _template,
    "format:no_whitespace": lambda text, given: not re.search(r"\s", text),
    "custom:multiples": _multiples,
    "custom:mcq_count_length": _questions,
    "custom:reverse_newline": _african_countries,
    "custom:word_reverse": _reversed_words,
    "custom:character_reverse": lambda text, given: "elgae dlab" in text.lower(),
    "custom:sentence_alphabet": _sentence_alphabet,
    "custom:european_capitals_sort": _capitals,
    "custom:csv_city": _csv_city,
    "custom:csv_special_character": _csv_special,
    "custom:csv_quotes": _csv_quotes,
    "custom:date_format_list": _dates,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": lambda text, given: text.strip().lower() == _REPEATED.lower(),
    "repeat:repeat_span": _repeat_span,
}
"""Instruction id to check."""
