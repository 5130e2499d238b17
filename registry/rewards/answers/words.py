"""Answers that are words, letters of a choice, or have words around a number."""

import re

_UNITS = {
    "mm": "millimeter millimeters", "cm": "centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres", "in": "inch inches", "ft": "foot feet", "yd": "yard yards",
    "mi": "mile miles", "s": "sec second seconds", "min": "minute minutes", "h": "hr hour hours", "g": "gram grams",
    "kg": "kilogram kilograms", "lb": "pound pounds lbs", "day": "days", "week": "weeks", "year": "years",
    "dollar": "dollars", "cent": "cents",
}  # fmt: skip
_UNIT = {name: unit for unit, names in _UNITS.items() for name in (unit, *names.split())}
_TRAILING = re.compile(
    r"\d[\s}]*(?:\\[,; ]|~)?\s*(?:\\(?:text|mathrm|mbox)\s*\{)?[\s~]*([A-Za-z]+)[\s}]*(?:\^\{?[23]\}?)?[.$]*$"
)


def unit(text: str) -> str:
    """The unit after the number at the end of a text, if it is a common one; else empty."""
    found = _TRAILING.search(text)
    return _UNIT.get(found[1], "") if found else ""


_CHOICE = re.compile(
    r"(?i:(?:the\s+|my\s+)?(?:(?:correct|final|best|right)\s+)?(?:answer|option|choice)(?:\s+is)?(?:\s*:\s*|\s+)){0,2}"
    r"(?:(?P<marked>[(\[]?\s*[A-Z]\s*[)\]])|(?P<bare>[A-Z]))(?P<rest>(?:[\s.:,;\-–—].*)?)",
    re.DOTALL,
)
_OTHER_CHOICE = re.compile(
    r"\s*(?:/|&|\+|\b(?:or|and)\b)|[\s.,;:]*\(?[A-Z]\)?\s*(?:[.,;/)]|$|\b(?:or|and)\b)|\s*,\s*\(?[A-Z]\b"
)
_TAKEN_BACK = re.compile(
    r"""\W{0,4}(?i:is|was|seems|looks)(?:n't\b|\s+(?!the\ only\b)(?:\w{1,12}\s+){0,2}
        (?i:not|never|wrong|incorrect|false|invalid|impossible|unlikely)\b)
    |\W{0,4}(?i:cannot|can't|can\s+not|(?:might|may|could)\s+be)\b
    |\W{1,4}(?:(?i:or|else|maybe|perhaps|possibly|no|wait|actually|oops|sorry|rather|it's|is|option|choice)\W{1,3}){1,4}
        [A-Z]\b
    |\s?[,(]\s?(?i:maybe|perhaps|possibly|probably|not\s+sure|unsure)\b""",
    re.VERBOSE,
)  # B is wrong; B (or C); B. No wait, C; but C) maybe is an option with its text
_REASON = re.compile(r"\s*(?:[.:,;)\-–—]|because\b|since\b|as\b|is\b|\()", re.IGNORECASE)


def choice_letter(text: str) -> str | None:
    """The one letter that a multiple choice answer states: ``C``, ``(C)``, ``C: the option``, ``C because ...``."""
    text = text.strip(" *_`")
    if len(text) > 2 and (text[0], text[-1]) in (("'", "'"), ('"', '"'), ("‘", "’"), ("“", "”")):
        text = text[1:-1]
    if re.fullmatch(r"\(?[a-z][).]*", text):
        text = text.upper()
    found = _CHOICE.fullmatch(text)
    if found is None:
        return None
    rest = found["rest"]
    if rest.strip(" .,:;") and (
        _OTHER_CHOICE.match(rest) or _TAKEN_BACK.match(rest) or not (found["marked"] or _REASON.match(rest))
    ):
        return None
    return (found["marked"] or found["bare"]).strip("()[] ")


SAME = [
    {"nosolution", "nosolutions", "nosolutionexists", "norealsolution", "norealsolutions", "emptyset", r"\emptyset",
     "theemptyset", r"\{\}"},
    {"undefined", "doesnotexist", "dne", "notdefined", "thelimitdoesnotexist"},
]  # fmt: skip
_WORD = re.compile(r"[^\W\d_][^\W\d_'\- .?!]*(?:[\s'\-,.?!]+[^\W\d_]+)*[.?!]?")


_LETTERS = re.compile(r"[^\W\d_]{2}")


def is_word(text: str) -> bool:
    """Whether a text is words, in which the order of letters counts (AB is not BA)."""
    return _WORD.fullmatch(text) is not None and bool(_LETTERS.search(text)) and text.lower() != "pi"


def letters(text: str) -> str:
    """What counts of words: no case, no article, no punctuation."""
    text = re.sub(r"^the (?:\w+ ){1,2}(?:is|are) ", "", text.strip().lower())  # the sequence is convergent
    return re.sub(r"^(?:the|a|an)\s+|[\s.?!,'\-]+", "", text)


def lead(text: str) -> str:
    """The words before the number of a text: June, in June 20."""
    found = re.match(r"[A-Za-z ]{3,}(?=[\s$]*[-+]?\d)", text)
    return letters(found[0]) if found and "answer" not in found[0].lower() else ""
