"""One spelling for what LaTeX and plain text write in many ways."""

import re

from registry.rewards.numbers import MULTIPLES, plain

MAX_ANSWER = 1_000
"""Longer answers (in characters) are refused before anything looks at them."""

_GREEK = {
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "λ": r"\lambda ", "μ": r"\mu ",
    "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ", "Δ": r"\Delta ", "Ω": r"\Omega ",
}  # fmt: skip
_UNICODE = {
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∞": r"\infty ", **_GREEK, "∪": r"\cup ", "∩": r"\cap ", "π": r"\pi ", "√": r"\sqrt ", "∈": r"\in ", "±": r"\pm ",
    "∅": r"\emptyset ", "°": r"^\circ ", "θ": r"\theta ", "。": ".", "、": ",", "，": ",", "；": ";",
    "⟨": "(", "⟩": ")", "″": '"', "′": "'",
}  # fmt: skip
_KNOWN = (
    "frac|dfrac|tfrac|sqrt|pi|text|left|right|infty|cdot|circ|times|pm|cup|in|le|ge|leq|geq|theta|mathrm|log|ln|sin|cos"
)
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in [
        (rf"\\\\(?=(?:{_KNOWN})(?![a-zA-Z]))", r"\\"),  # a gold whose backslashes were doubled
        (r"\\!", ""),
        (r"\{,\}", ","),
        (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ""),  # 1\,234
        (r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|hfill)(?![a-zA-Z])", ""),
        (r"\\\\\s*\[[^\]]*\]", r"\\\\"),
        (r"(?<!\\)\\(?:[,;: ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z]))|~|(?<!\\)\\[()\[\]]", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"\\(?:leq|leqslant|lte)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant|gte)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:langle)(?![a-zA-Z])", "("),
        (r"\\(?:rangle)(?![a-zA-Z])", ")"),
        (r"\\([%#&$])", r"\1"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])|(?<=\d)\s*(?:degrees?|deg)\b", r"^\\circ "),
        (r"\b(?:infinity)\b", r"\\infty "),
        (r"\\(?:operatorname|underline|mathbf|mathbb|mathcal|boldsymbol)\s*\*?\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\{([^{}]+)\\choose(?![a-zA-Z])([^{}]+)\}", r"\\binom{\1}{\2}"),
        (r"\{([^{}]+)\\over(?![a-zA-Z])([^{}]+)\}", r"\\frac{\1}{\2}"),
        (r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times "),
        (r"(?<=\d) to (?=\d)", ":"),
        (r"\$", " "),
    ]
]
_TEXT = re.compile(r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|it|sf)|mbox|hbox)\s*\{([^{}]*)\}")
_ORDINAL = re.compile(r"(?<=\d)\s*\^?\s*\{?\s*(?:st|nd|rd|th)\s*\}?(?![a-zA-Z])")
_UNIT_TEXT = re.compile(
    r"(?<=[\w})])\s*\\(?:text(?:bf|rm|it)?|math(?:rm|it)|mbox|hbox)\s*\{\s*([a-zA-Z][a-zA-Z. /^23-]*)\}"
    r"\s*(?:\^\s*\{?[23]\}?)?\s*\.?$"
)
_NOT_A_UNIT = re.compile(  # nor is a word that changes the number, or denies it
    r"\b(?:or|and|if|mod|for|when|not|isn|no|incorrect|wrong|false|maybe|perhaps|than)\b"
    rf"|^\s*(?:squared|cubed|factorial|half|halves|{'|'.join(MULTIPLES)})\b",
    re.IGNORECASE,
)


_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")


def _repeated(found: re.Match[str]) -> str:
    r"""0.1\overline{6} as the fraction (16 - 1)/90."""
    whole, fixed, cycle = found.groups()
    numerator = int(whole + fixed + cycle) - int(whole + fixed or 0)
    return f"\\frac{{{numerator}}}{{{'9' * len(cycle) + '0' * len(fixed)}}}"


def unbox(text: str) -> str:
    """Without the braces or parentheses that enclose all of a text."""
    while len(text) > 1 and text[0] == "{" and text[-1] == "}" and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def normalise(text: str) -> str:
    """The text in one spelling: ASCII digits and signs, one form of each command, no delimiters, no final stop."""
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]{2,}", lambda m: "^{" + m[0].translate(_SUPER) + "}", text)
    text = "".join(_UNICODE.get(c, c) for c in text)
    # plain() takes currency signs away, the math delimiter $ among them; \$ too.
    text = plain(text.replace(r"\$", " ").replace("$", " "))
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    if (unit := _UNIT_TEXT.search(text)) and not _NOT_A_UNIT.search(unit[1]):
        text = text[: unit.start()]
    text = _REPEATING.sub(_repeated, text)
    text = _TEXT.sub(r" \1 ", text)
    text = _ORDINAL.sub("", text)
    text = re.sub(r"\s+", " ", text).strip()
    while text != (text := unbox(text.strip().rstrip(".,;:\\").strip())):
        pass
    return text


def squeezed(text: str) -> str:
    """Without spaces, but for those between digits: equal texts are equal answers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def depth(text: str) -> int:
    """How deeply brackets nest."""
    now = deepest = 0
    for c in text:
        now += (c in _OPEN) - (c in _CLOSE)
        deepest = max(deepest, now)
    return deepest


_OPEN, _CLOSE = "([{", ")]}"


def closing(text: str, start: int) -> int:
    r"""The index of the bracket that closes the one at ``start``; -1 if none does. Half-open intervals mix kinds."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in _OPEN:
            depth += 1
        elif text[i] in _CLOSE:
            depth -= 1
            if depth == 0:
                return i
    return -1


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts between separators outside of all brackets."""
    parts, start, depth, i = [], 0, 0, 0
    while i < len(text):
        found = separator.match(text, i) if depth == 0 else None
        if found and found.end() > i:
            parts.append(text[start:i].strip())
            start = i = found.end()
            continue
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        i += 1
    return [*parts, text[start:].strip()]
