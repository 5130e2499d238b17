"""Reading the one number of a short answer, exactly.

Nothing is evaluated and nothing grows: text of up to ``MAX_CHARS`` characters goes through a fixed list of patterns.
What is not plainly one number (two numbers, a hedge, an expression, an unknown sign) is refused: a wrongly paid answer
teaches the policy more harm than a wrongly refused one.
"""

import re
import unicodedata
from fractions import Fraction

MAX_CHARS = 100
MAX_EXPONENT = 100  # 1e100 is no answer to a word problem, and 1e999999999 would never end

_PUNCTUATION = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-") | {"٫": ".", "٬": ",", "’": "'", "`": "'", "⁄": "/"})
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in [
        (r"\\!", ""),
        (r"\\[,;: ]|~|\\[()\[\]]|\\left|\\right", " "),  # 1\,234
        (r"\{,\}", ","),  # 1{,}234
        (r"\\([$%#&])", r"\1"),
        (r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm|it)|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))", r" \1\3/\2\4 "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°", " "),
        (r"\^\s*\{\s*(st|nd|rd|th)\s*\}", r"\1"),
        (r"\b([kcdm]?m|ft|in|yd)(?:\^?[23]|\^\{[23]\})(?!\d)", r"\1"),  # square and cubic units
        (r"\b(?:minus|negative)\s+(?=\.?\d)", "-"),
    ]
]
_PLAIN = r"(?:\d{1,3}(?P<_>[,' ])\d{3}(?:(?P=_)\d{3})*(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]\s*)?
         (?:(?P<whole>\d+)\s+(?=\d+\s*/\s*\d))?   # of a mixed number
         (?P<value>{_PLAIN.replace("_", "separator")}) (?:e(?P<exponent>[+-]?\d+))?
         (?:\s*/\s*(?P<divisor>{_PLAIN.replace("_", "separator2")}))?""",
    re.VERBOSE,
)
# Around the number: words and harmless punctuation. A letter at the number or at a bracket before it may be a function
# or a variable.
_BEFORE = re.compile(
    r"(?:(?:[^\W\d_]|(?<=[^\W\d_])-(?=[^\W\d_])|[\s.,:;!?'\"()\[\]*_#=])*[\s.,:;!?'\"()\[\]*_#=])?(?<![^\W\d_][(\[])"
)
_AFTER = re.compile(r"(?:[^\W\d_]|[-/](?=[^\W\d_])|[\s.,:;!?'\"()\[\]*_])*")
# Before the sign of a sum: one letter or a bracket, or any word if the sign has spaces around it (as _).
_TERM = re.compile(r"(?:(?<![^\W\d_])[^\W\d_]|[)\]])\s*_?$|[^\W\d_]\s+_$")
_WORD = re.compile(r"[^\W\d_]+")
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "dozens": 12,
}  # fmt: skip
_PARTS = {
    f"{name}{plural}": Fraction(1, n)
    for name, n in (("tenth", 10), ("hundredth", 100), ("thousandth", 1000), ("millionth", 10**6))
    for plural in ("", "s")
}
_REFUSED = {
    "or", "nor", "not", "either", "neither", "between", "than", "maybe", "perhaps", "plus", "minus", "negative",
    "half", "halves", "sqrt", "root", "log", "ln", "pi", "π", "squared", "cubed", "factorial", "two", "three",
    "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty", "thirty", "forty", "fifty",
    "sixty", "seventy", "eighty", "ninety", "incorrect", "wrong", "false", "isn", "untrue", "except",
}  # fmt: skip
# Directly before a number they change it.
_CHANGES = re.compile(
    r"\b(?:twice|double|triple|sin|cos|tan|under|above|below|over|reciprocal of|factorial of|square of|all but|"
    r"anything but)\s+[$\s]*$"
)
MULTIPLES: dict[str, Fraction] = {**{name: Fraction(n) for name, n in _SCALES.items()}, **_PARTS}
"""Words after a number that multiply it."""
_REFUSED_AFTER = _REFUSED | {"x", "y", "z", "k", "mn", "bn"} | _SCALES.keys()


def plain(text: str) -> str:
    """NFKC, with digits of all scripts as 0-9, but without its traps: 5² is not 52, 1½ is not 11/2."""
    out = []
    for c in text:
        kind = unicodedata.decomposition(c).partition(" ")[0]
        if kind in ("<super>", "<sub>"):
            out.append("^" + unicodedata.normalize("NFKC", c))
        elif kind == "<fraction>":
            out.append(" " + unicodedata.normalize("NFKC", c))
        elif unicodedata.category(c) == "Sc":
            out.append(" ")
        else:
            out.append(str(unicodedata.decimal(c)) if c.isdecimal() else c)
    return unicodedata.normalize("NFKC", "".join(out)).translate(_PUNCTUATION)


def _exact(plain: str) -> Fraction:
    return Fraction(re.sub(r"[,' ]", "", plain))


def parse_number(text: str) -> Fraction | None:
    """The number that ``text`` states, with or without words around it; None if it does not state exactly one.

    Read are thousands separators, currency, percent signs (``50%`` is 50), fractions, mixed numbers, exponents, scales
    (``2 million``), and the LaTeX around such things.
    """
    if len(text) > MAX_CHARS:
        return None
    text = plain(text).lower()
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = re.sub("[$%]", " ", text)
    found = _NUMBER.search(text)
    if found is None:
        return None
    before, after = text[: found.start()], text[found.end() :]
    if found["sign"] and _TERM.search(before + ("_" if found["sign"][1:] else "")):
        return None
    if re.search(r"\bat (?:least|most)\b", text) or _CHANGES.search(before):
        return None
    if not (_BEFORE.fullmatch(before) and _AFTER.fullmatch(after)):
        return None
    if found["exponent"] and abs(int(found["exponent"])) > MAX_EXPONENT:
        return None
    value = _exact(found["value"]) * Fraction(10) ** int(found["exponent"] or 0)
    if found["divisor"]:
        divisor = _exact(found["divisor"])
        if divisor == 0:
            return None
        value /= divisor
    value += int(found["whole"] or 0)
    words = _WORD.findall(after)
    while words and words[0] in MULTIPLES:
        value *= MULTIPLES[words.pop(0)]
    if not (_REFUSED.isdisjoint(_WORD.findall(before)) and _REFUSED_AFTER.isdisjoint(words)):
        return None
    return -value if (found["sign"] or "").startswith("-") else value
