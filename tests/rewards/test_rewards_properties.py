"""Properties of the graders: reflexive, insensitive to dressing, symmetric, never raising."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollmill.config.reward import RewardConfig
from rollmill.rewards.graders.f1 import f1
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.judging import judge_with
from rollmill.rewards.mathematics.clean import clean
from rollmill.rewards.mathematics.equal import answers_equal
from rollmill.rewards.mathematics.evaluate import values_equal
from rollmill.rewards.mathematics.extract import boxes, final_answer, last_boxed
from rollmill.rewards.mathematics.numbers import read_quantity
from rollmill.rewards.mathematics.symbolic import expressions_equal
from rollmill.rewards.outcome import OutcomeKind
from rollmill.rewards.registry import GraderTable

CASES = Path(__file__).parent / "cases"
TYPES = ("math", "deepscaler", "dapo", "f1", "gpqa", "ifbench")
TABLE = GraderTable(RewardConfig(), base_dir=CASES, seed=0)

integers = st.integers(-(10**40), 10**40)
rationals = st.fractions(max_denominator=10**6)
letters = st.sampled_from("xyzabn")
small = st.integers(1, 30)


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(0, 59))
def test_two_units_are_one_quantity(hours: int, minutes: int) -> None:
    both = f"{hours} hours and {minutes} minutes"

    assert answers_equal(both, f"{60 * hours + minutes} minutes")
    assert not answers_equal(both, f"{60 * hours + minutes + 1} minutes")


@settings(deadline=None)
@given(st.permutations(["x", "y", "z"]), st.lists(small, min_size=3, max_size=3, unique=True))
def test_a_tuple_with_names_goes_by_its_names(names: list[str], values: list[int]) -> None:
    by_name = dict(zip(names, values, strict=True))
    named = f"({','.join(names)})=({','.join(map(str, values))})"
    sorted_values = f"({','.join(str(by_name[name]) for name in 'xyz')})"

    assert answers_equal(named, f"(x,y,z)={sorted_values}")
    assert answers_equal(named, f"({','.join(map(str, values))})")


def numbers_as_latex(value: Fraction) -> list[str]:
    sign, top = ("-" if value < 0 else ""), abs(value.numerator)
    forms = [f"{sign}{top}/{value.denominator}", rf"{sign}\frac{{{top}}}{{{value.denominator}}}"]
    if value.denominator == 1:
        forms += [f"{sign}{top}", f"{sign}{top}.0", f"{sign}{top:,}"]
    return forms


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """Expressions in LaTeX that are short enough never to explode, and nowhere divide by 0."""
    if depth == 0:
        return str(draw(st.one_of(small.map(str), letters, st.just(r"\pi"))))
    inner = expressions(depth - 1)
    kind = draw(st.integers(0, 6))
    a, b = draw(inner), draw(inner)
    forms = (
        f"({a})+({b})", f"({a})-({b})", rf"({a})\cdot({b})", rf"\frac{{{a}}}{{({b})^{{2}}+7}}",
        rf"\sqrt{{{a}}}", f"({a})^{{2}}", a,
    )  # fmt: skip
    return forms[kind]


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Answers of all structures."""
    item = st.one_of(
        integers.map(str), expressions(2), st.sampled_from(["Monday", "red", r"\infty"])
    )
    items = draw(st.lists(item, min_size=1, max_size=3))
    joined = ", ".join(items)
    shape = draw(st.integers(0, 4))
    return (items[0], joined, f"({joined})", rf"\{{{joined}\}}", f"x = {items[0]}")[shape]


@given(answers())
@settings(max_examples=300, deadline=None)
def test_gold_scores_full(label: str) -> None:
    grader: Any = TABLE.get("math")
    item = RewardInput(response=rf"So \boxed{{{label}}}.", label=label)

    assert judge_with(grader, item).reward == 1.0


@given(answers(), st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_dressing_does_not_matter(answer: str, dressing: int) -> None:
    dressed = (
        f"${answer}$",
        f"  {answer}\n",
        rf"\({answer}\)",
        f"**{answer}**",
        rf"\displaystyle {answer}",
        answer.replace("(", r"\left(").replace(")", r"\right)"),
        answer.replace(r"\frac", r"\dfrac"),
        f"{answer}.",
    )[dressing]

    assert answers_equal(dressed, answer)


@given(answers(), answers())
@settings(max_examples=200, deadline=None)
def test_equality_is_symmetric(a: str, b: str) -> None:
    assert answers_equal(a, b) == answers_equal(b, a)


@given(rationals, rationals)
@settings(max_examples=300, deadline=None)
def test_rationals_are_compared_exactly(a: Fraction, b: Fraction) -> None:
    for left in numbers_as_latex(a):
        for right in numbers_as_latex(b):
            assert answers_equal(left, right) == (a == b), (left, right)


@given(integers, st.integers(-3, 3))
@settings(max_examples=300, deadline=None)
def test_integers_of_any_size_are_compared_as_integers(value: int, step: int) -> None:
    assert answers_equal(str(value), f"{value + step:,}") == (step == 0)


@given(st.integers(1, 9), st.integers(0, 2), st.integers(2001, 6000))
@settings(max_examples=20, deadline=None)
def test_very_long_integers_are_compared_by_their_digits(digit: int, step: int, size: int) -> None:
    number = str(digit) * size
    other = number[:-1] + str((digit + step) % 10)

    assert answers_equal(number, f"00{other}") == (step == 0)


@given(rationals)
@settings(max_examples=200, deadline=None)
def test_a_number_is_not_equal_to_a_number_close_by(value: Fraction) -> None:
    near = value + Fraction(1, 10**30)

    assert not answers_equal(str(value), str(near))


@given(st.lists(integers, min_size=2, max_size=6, unique=True), st.randoms())
@settings(max_examples=150, deadline=None)
def test_lists_and_sets_are_equal_in_any_order_and_tuples_are_not(values: Any, rng: Any) -> None:
    shuffled = values.copy()
    rng.shuffle(shuffled)
    gold, other = ", ".join(map(str, values)), ", ".join(map(str, shuffled))

    assert answers_equal(gold, other)
    assert answers_equal(rf"\{{{gold}\}}", rf"\{{{other}\}}")
    assert answers_equal(f"({gold})", f"({other})") == (values == shuffled)
    assert not answers_equal(gold, ", ".join(map(str, values[:-1])))


@given(expressions(), expressions())
@settings(max_examples=100, deadline=None)
def test_the_quick_evaluation_agrees_with_the_library(a: str, b: str) -> None:
    """Both ways say the same wherever the quick one dares to say something."""
    quick = values_equal(a, b)

    if quick is not None:
        assert quick == expressions_equal(a, b)
    assert values_equal(a, a) in (True, None)


@given(expressions(2), expressions(2))
@settings(max_examples=150, deadline=None)
def test_sums_and_products_commute(a: str, b: str) -> None:
    assert answers_equal(f"({a})+({b})", f"({b})+({a})")
    assert answers_equal(rf"({a})\cdot({b})", rf"({b})\cdot({a})")
    assert not answers_equal(f"({a})+1", f"({a})+2")


hostile_text = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="\\{}[]()$^_,.;:=<>|&%#-+*/ 0123456789xe\n", max_size=120),
    st.lists(
        st.sampled_from(
            ["\\boxed", "\\frac", "{", "}", "\\sqrt", "\\text{", "\\begin{pmatrix}", "&", "\\\\",
             "\\end{pmatrix}", "Answer:", "the answer is", "(", ")", ",", "5", "x", "=", "\\pm",
             "\\cup", "%", "km", "^", "</think>", "####", "B", "\\{", "\\}", "|"]
        ),
        max_size=25,
    ).map("".join),
)  # fmt: skip
labels = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), hostile_text,
    st.lists(st.one_of(st.integers(), st.text(max_size=20), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
@given(response=hostile_text, label=labels)
@example(response="\\boxed{" * 60, label="5")
@example(response="\\boxed{" + "(" * 300 + "}", label="(" * 300)
@example(response="\\boxed{\\frac{\\frac}}", label="\\frac")
@example(response="\\boxed{\x00}", label="\x00")
@settings(max_examples=120, deadline=None)
def test_graders_never_raise_and_give_numbers(kind: str, response: str, label: Any) -> None:
    grader: Any = TABLE.get(kind)
    metadata = {"instruction_id_list": ["punctuation:no_comma"], "choices": ["a", "b", "c"]}

    outcome = judge_with(grader, RewardInput(response=response, label=label, metadata=metadata))

    is_value = outcome.kind is OutcomeKind.VALUE
    assert is_value == (outcome.reward is not None)
    if outcome.kind is OutcomeKind.ERROR:
        assert "expected" in str(outcome.detail), outcome


@given(hostile_text)
@settings(max_examples=200, deadline=None)
def test_cleaning_and_reading_never_raise(text: str) -> None:
    cleaned = clean(text)
    read_quantity(cleaned)
    final_answer(text)
    for box in boxes(text):
        assert text[box.start : box.end].startswith(("\\boxed", "\\fbox"))


@given(st.text(alphabet="abc{}\\ 12", max_size=30).filter(lambda t: t.count("{") == t.count("}")))
@settings(max_examples=100, deadline=None)
def test_the_last_box_is_found_whatever_stands_before_it(noise: str) -> None:
    assert last_boxed(noise + " and then a good deal of other text follows: \\boxed{42}") == "42"


words = st.lists(st.sampled_from(("red", "green", "blue", "the", "3.5", "-5", "tree")), min_size=1)


@given(words, words)
def test_f1_is_symmetric_and_between_0_and_1(a: list[str], b: list[str]) -> None:
    score = f1(" ".join(a), " ".join(b))

    assert 0.0 <= score <= 1.0
    assert score == pytest.approx(f1(" ".join(b), " ".join(a)))
    assert f1(" ".join(a), "  ".join(a).upper() + "!") == 1.0 or set(a) == {"the"}


def test_no_case_of_the_table_depends_on_white_space_around_the_response() -> None:
    for line in (CASES / "dapo.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        grader: Any = TABLE.get(row["type"])
        plain = judge_with(grader, RewardInput(response=row["response"], label=row["label"]))
        spaced = judge_with(
            grader, RewardInput(response=f"{row['response']}\n", label=row["label"])
        )

        assert plain.reward == spaced.reward, row
