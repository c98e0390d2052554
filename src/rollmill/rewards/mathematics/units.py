"""Units of measure: names, and exact factors between them. A unit that is left out fits any."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of base dimensions, and its size in their base units."""

    dimension: Dimension
    factor: Fraction


_TABLE: dict[str, tuple[str, str]] = {
    # names: (dimension, factor as an exact decimal or ratio)
    "mm millimeter millimetre": ("length", "1/1000"),
    "cm centimeter centimetre": ("length", "1/100"),
    "dm decimeter decimetre": ("length", "1/10"),
    "m meter metre": ("length", "1"),
    "km kilometer kilometre": ("length", "1000"),
    "in inch inches": ("length", "0.0254"),
    "ft foot feet": ("length", "0.3048"),
    "yd yard": ("length", "0.9144"),
    "mi mile": ("length", "1609.344"),
    "mg milligram": ("mass", "1/1000000"),
    "g gram": ("mass", "1/1000"),
    "kg kilogram": ("mass", "1"),
    "ton tonne": ("mass", "1000"),
    "lb lbs pound": ("mass", "0.45359237"),
    "oz ounce": ("mass", "0.028349523125"),
    "ms millisecond": ("time", "1/1000"),
    "s sec second": ("time", "1"),
    "min minute": ("time", "60"),
    "h hr hour": ("time", "3600"),
    "day": ("time", "86400"),
    "week": ("time", "604800"),
    "month": ("month", "1"),
    "year yr": ("month", "12"),
    "dollar usd $": ("dollar", "1"),
    "cent ¢": ("dollar", "1/100"),
    "euro eur €": ("euro", "1"),
    "gbp £": ("sterling", "1"),
    "yen ¥": ("yen", "1"),
    "rupee ₹ Rs": ("rupee", "1"),
    "° degree deg": ("angle", "1"),
    "rad radian": ("radian", "1"),
    "°C celsius": ("celsius", "1"),
    "°F fahrenheit": ("fahrenheit", "1"),
    "K kelvin": ("kelvin", "1"),
    "mph": ("speed", "1609.344/3600"),
    "kph kmh": ("speed", "1000/3600"),
    "N newton": ("force", "1"),
    "J joule": ("energy", "1"),
    "kJ kilojoule": ("energy", "1000"),
    "W watt": ("power", "1"),
    "kW kilowatt": ("power", "1000"),
    "V volt": ("voltage", "1"),
    "A ampere amp": ("current", "1"),
    "Hz hertz": ("frequency", "1"),
    "kHz kilohertz": ("frequency", "1000"),
    "MHz megahertz": ("frequency", "1000000"),
    "GHz gigahertz": ("frequency", "1000000000"),
    "Pa pascal": ("pressure", "1"),
    "kPa kilopascal": ("pressure", "1000"),
    "MPa megapascal": ("pressure", "1000000"),
    "atm atmosphere": ("pressure", "101325"),
    "eV electronvolt": ("energy", "1.602176634e-19"),
    "keV": ("energy", "1.602176634e-16"),
    "MeV": ("energy", "1.602176634e-13"),
    "MJ megajoule": ("energy", "1000000"),
    "MW megawatt": ("power", "1000000"),
    "mW milliwatt": ("power", "1/1000"),
    "kN kilonewton": ("force", "1000"),
    "kV kilovolt": ("voltage", "1000"),
    "mV millivolt": ("voltage", "1/1000"),
    "mA milliampere milliamp": ("current", "1/1000"),
    "ohm Ω": ("resistance", "1"),
    "C coulomb": ("charge", "1"),
    "T tesla": ("magnetism", "1"),
    "nm nanometer nanometre": ("length", "1/1000000000"),
    "μm micrometer micrometre micron": ("length", "1/1000000"),
    "μs microsecond": ("time", "1/1000000"),
    "ns nanosecond": ("time", "1/1000000000"),
    "mol mole": ("amount", "1"),
    "bit": ("information", "1"),
    "byte": ("information", "8"),
    "ml mL milliliter millilitre": ("volume", "1/1000000"),
    "L l liter litre": ("volume", "1/1000"),
    "gallon gal": ("volume", "0.003785411784"),
}
_COMPOUND: dict[str, Dimension] = {
    "speed": (("length", 1), ("time", -1)),
    "volume": (("length", 3),),
}


def _ratio(text: str) -> Fraction:
    top, _, bottom = text.partition("/")
    return Fraction(top) / Fraction(bottom or "1")


_UNITS: dict[str, Unit] = {
    name: Unit(_COMPOUND.get(kind, ((kind, 1),)), _ratio(factor))
    for names, (kind, factor) in _TABLE.items()
    for name in names.split()
}
_PLURALS = {f"{name}s": unit for name, unit in _UNITS.items() if len(name) > 2}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_TOKEN = re.compile(r"[a-zA-ZμΩ]+|°[CF]?(?![a-zA-Z])|[$€£¥₹¢]|[/*·]|\\cdot|\^\{?(-?\d)\}?|\s+|\.")


def find_unit(text: str) -> Unit | None:
    """The unit that `text` names as a whole (`km/h`, `square meters`, `cm^2`), or None."""
    exponents: dict[str, int] = {}
    factor = Fraction(1)
    sign = last_sign = power = 1
    last: Unit | None = None
    position = 0
    text = text.strip().replace(r"\Omega", "Ω").replace(r"\mu ", "μ")
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return None
        position = token.end()
        part = token.group().strip()
        if part in ("", "*", "·", ".", r"\cdot", "of"):
            continue
        if part in ("/", "per"):
            sign = -1
        elif part.lower() in _POWERS:
            power = _POWERS[part.lower()]
        elif part.startswith("^"):
            if last is None:
                return None
            extra = int(token.group(1)) - 1
            factor *= _add(exponents, last, last_sign * extra)
        else:
            last = _named(part)
            if last is None:
                return None
            last_sign = sign
            factor *= _add(exponents, last, sign * power)
            power = 1
    if last is None:
        return None
    dimension = tuple(sorted((base, n) for base, n in exponents.items() if n))
    return Unit(dimension, factor)


def _named(name: str) -> Unit | None:
    for spelling in (name, name.lower()):
        unit = _UNITS.get(spelling) or _PLURALS.get(spelling)
        if unit is not None and (spelling == name or len(name) > 2):
            return unit
    return None


def _add(exponents: dict[str, int], unit: Unit, power: int) -> Fraction:
    for base, exponent in unit.dimension:
        exponents[base] = exponents.get(base, 0) + exponent * power
    return unit.factor**power
