"""Finding the final answer in a completion, by fixed rules that take linear time.

Every rule looks for a mark that states an answer (a box, a tag, ``####``, "the answer is"): a number that is merely
mentioned is none.
"""

import re
from typing import NamedTuple

from registry.rewards.numbers import parse_number

MAX_STATEMENTS = 2  # an answer and its correction; more are an enumeration that hopes to hit

MAX_SENTENCE = 400


class Extract(NamedTuple):
    """An answer and the rule that found it; without an answer, why there is none."""

    text: str | None
    rule: str


_ENDS = (
    "<|im_end|>", "</s>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<eos>", "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip


def without_end(text: str) -> str:
    """Without the special tokens that end a completion."""
    end = whole = len(text.rstrip())
    while token := next((token for token in _ENDS if text.endswith(token, 0, end)), None):
        end -= len(token)
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end] if end < whole else text


def after_thinking(completion: str) -> str | None:
    """What follows the last ``</think>``, or everything without one; None if thinking never ended."""
    final = without_end(completion.rpartition("</think>")[2])
    return None if "<think>" in final else final


_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(
    r"(?:[\s,;$.]|\\[()\[\],; ]|\\text\{|\\(?:quad|qquad)\b|[{}]|\bor\s{1,3}(?:\$|\\\()?[A-Za-z]\s{0,3}="
    r"|\b(?:and|or|(?i:maybe|perhaps|possibly))\b)*"
)  # boxes of one answer: \boxed{3}, \boxed{5} and \boxed{7}; x=\boxed{3} or x=\boxed{5}
_GUESS = re.compile(r"\b(?:maybe|perhaps|possibly)\b", re.IGNORECASE)
_ASKED = re.compile(r"\d[}\s$]{0,3}\?{1,3}[}\s$.]{0,4}\Z")  # 5?


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Start, end and content of each ``\boxed{...}`` or ``\fbox{...}`` with balanced braces (``\{`` is none).

    One pass with a stack: looking for the end of each box anew would take quadratic time on a completion full of
    ``\boxed{``.
    """
    found: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            if opened and (opening := opened.pop())[0] != "{":
                found.append((opening.start(), token.end(), text[opening.end() : token.start()].strip()))
        elif token[0][-1] == "{" and token[0] != r"\{":
            opened.append(token)
    return sorted(found)


def last_box(text: str) -> tuple[int, int, str] | None:
    """The last of ``boxes``."""
    return max(boxes(text), default=None)


def joined(text: str, marks: list[tuple[int, int, str]]) -> str | None:
    """The content of the last mark, with those before it that only a comma or an "and" parts from it.

    ``The roots are [3], [5]`` is one answer; ``maybe [3] ... no, [5]`` is 5; ``[1] [2] [3]`` is a list, not 3. None for
    a guess: ``[5?]``, ``[3] or maybe [5]``.
    """
    if not marks:
        return None
    parts = [marks[-1][2]]
    for (_, end, content), (start, _, _) in zip(reversed(marks[:-1]), reversed(marks[1:]), strict=True):
        if end > start or not _BETWEEN.fullmatch(text, end, start) or not parts[0]:
            break
        if _GUESS.search(text, end, start):
            return None
        parts.insert(0, content)
    return None if any(map(_ASKED.search, parts)) else ", ".join(dict.fromkeys(parts)) or None


def boxed(completion: str) -> Extract:
    """The last box after the thinking, with the boxes that it continues."""
    final = after_thinking(completion)
    if final is None:
        return Extract(None, "thinking never ended")
    return Extract(joined(final, boxes(final)), "box")


_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def tagged(completion: str) -> Extract:
    """The last ``<answer>...</answer>`` after the thinking, with those it continues; its content may be boxed."""
    final = after_thinking(completion)
    if final is None:
        return Extract(None, "thinking never ended")
    marks = [(m.start(), m.end(), m[1].strip()) for m in _ANSWER.finditer(final)]
    answer = joined(final, marks) or ""
    box = last_box(answer)
    if box and not re.search(r"\d|\bor\b", answer[: box[0]] + answer[box[1] :]):
        answer = box[2]  # <answer>\boxed{5}</answer> is a habit of models trained on boxes
    return Extract(answer or None, "tag")


_HASH = re.compile(r"^[ \t]*####[ \t]*([^\s#][^\n]*)$", re.MULTILINE)
_LABEL = re.compile(
    r"""(?:\b(?:answer|option|choice|ответ|réponse|respuesta|antwort)\b["'*_\s]{0,4}(?:\bis\b|\bare\b|:|：|=)
        |(?:答案|结果)(?:是|为|：|:)|故选|(?:答案|所以|应)选择?(?=[*\s(（]{0,3}(?-i:[A-Z])(?![A-Za-z]))
        |^(?:\#{1,6}\ |\*\*)(?:final\ |correct\ )?answer\*{0,2}[ ]{0,3}\n
            (?=\s{0,3}\*{0,2}\(?(?-i:[A-Z])(?:[).:,*]|[ ]{0,3}$))
        )[:：*_\s]{0,6}(?=\S)""",
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
_STOP = re.compile(r"[.!?](?=\s|$|\*)|[。！？；\n]")
_HEDGED = re.compile(
    r"^not\b|\b(?:either|maybe|perhaps|possibly|might|could|guess|or so|unknown|unclear)\b|(?<!\d)\.\.\.|…|\?",
    re.IGNORECASE,
)
_UNSURE = re.compile(_HEDGED.pattern + r"|\bnot\b|\bor\b|n't\b|\bif\b|\bthan\b", re.IGNORECASE)
_CHECKED = re.compile(
    r"\b(?:check|verify|confirm|test)(?:ing)?\s+(?:(?:the|my|our|this)\s+)?(?:final\s+)?\Z", re.IGNORECASE
)  # Let me check the answer:
_DERIVED = re.compile(
    r"(?:found|obtained|given|computed|calculated|determined|derived|reached|checked|verified|confirmed)\s+"
    r"(?:by|from|as|in|with|using|to|when|if|through|at|below|above)\b",
    re.IGNORECASE,
)  # The answer is found by adding
_PRAISED = re.compile(
    r"(?:indeed\s+)?(?:correct|consistent\s+with|verified|confirmed|reasonable|plausible|as\s+expected)\b",
    re.IGNORECASE,
)  # So the answer is correct
_CORRECTED = re.compile(
    r"\W{0,4}(?:no\s?[,;:!–—-]|no[,.]?\s+wait\b|wait\b(?!,?\s+let)"
    r"|(?:oops|sorry|hmm|actually|correction|scratch\s+that)\b|or\s+maybe\b)",
    re.IGNORECASE,
)  # what takes back the statement before it
_CONCLUSION = re.compile(
    r".*(?:\b(?:is|are|equals|gives|get|to)\s|=)\s*(?:equal\s+to\s+)?(?=[-+−–$€£\\(\[{.\d])(\S.{0,60})"
)
_IS_THE_ANSWER = re.compile(
    r"(?:so|thus|therefore|hence)?,?\s*(?:(?:option|choice)\s+)?(\S{1,40})\s+is\s+(?:the|my)\s+"
    r"(?:(?:final|correct|right|best)\s+){0,2}(?:answer|option|choice)",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"(?:so|thus|therefore|hence)?,?\s*(?:i\s+(?:would\s+)?(?:choose|pick|select)\s+(?:(?:option|choice|answer)\s+)?"
    r"|(?:option|choice|answer)\s+(?=\S{1,8}\s+is\s+(?:correct|right)$))"
    r"(\W{0,3}(?-i:[A-Z])\W{0,3})(?:\s*is\s+(?:correct|right))?",
    re.IGNORECASE,
)


def _tidy(statement: str) -> str:
    r"""A statement without emphasis and math delimiters around it and the stop after it."""
    text = statement.strip()
    while text != (text := text.strip(' \t*_`"。，,;').removesuffix(".")):
        pass
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > 2 * len(left):
            return text[len(left) : -len(right)].strip()
    return text


def _sentence(text: str, start: int) -> str:
    stop = _STOP.search(text, start, start + MAX_SENTENCE)
    return text[start : stop.start() + (stop[0] == "?") if stop else start + MAX_SENTENCE]


def _labels(final: str) -> list[tuple[int, str]]:
    """Start and text of each statement after a label, without remarks on an answer or on the way to it."""
    found: list[tuple[int, str]] = []
    for label in _LABEL.finditer(final):
        text = _sentence(final, label.end())
        checked = _CHECKED.search(final, max(0, label.start() - 40), label.start())
        if not (_DERIVED.match(text) or (found and (checked or _PRAISED.match(text)))):
            found.append((label.end(), text))
    return found


def stated(completion: str) -> Extract:
    """The answer wherever it is plainly stated: the last box or ``####`` line; without them the last "the answer is";
    without that a last sentence that ends in "is ..." or a text that is nothing but an expression.
    """
    final = after_thinking(completion)
    if final is None:
        return Extract(None, "thinking never ended")
    final = final.strip()
    tags = tagged(final)
    if tags.text is not None:
        return tags
    found = boxes(final)
    hashes = list(_HASH.finditer(final))
    if found or not hashes or final.find("\n", hashes[-1].start()) >= 0:
        hashes = [mark for mark in hashes if not mark[1][0].isalpha()]  # those are headlines
    if hashes and (not found or hashes[-1].start() > found[-1][1]):
        if _ASKED.search(hashes[-1][1]):
            return Extract(None, "hedge")
        box = last_box(hashes[-1][1])
        return Extract(box[2] if box else _tidy(hashes[-1][1]) or None, "####")
    if found:
        return Extract(joined(final, found), "box")
    if bare := re.findall(r"\\(?:boxed|fbox)\s+([^\s{}$\\]+)", final):
        return Extract(_tidy(bare[-1]) or None, "box without braces")
    if r"\boxed" in final or r"\fbox" in final:
        return Extract(None, "box without an end")
    labels = _labels(final)
    if labels:
        answers = list(dict.fromkeys(_tidy(label) for _, label in labels))
        if len(answers) > MAX_STATEMENTS:
            return Extract(None, "many answers")
        start, last = labels[-1]
        hedged = _HEDGED.search(_tidy(last).partition(" because ")[0]) or _CORRECTED.match(final, start + len(last))
        return Extract(None, "hedge") if hedged else Extract(_tidy(last) or None, "answer is")
    return _conclusion(final)


def _conclusion(final: str) -> Extract:
    last = final[-300:].rpartition("\n")[2]
    if len(last) <= 100 and not re.search(r"[^\W\d_]{2}", last) and parse_number(_tidy(last)) is not None:
        return Extract(_tidy(last), "bare number")
    if verdict := re.match(r"(yes|no|true|false)(?:[.,!]|$)", final, re.IGNORECASE):
        return Extract(verdict[1], "first word")
    sentence = re.split(r"(?<=[.!?])\s+|[。！？；]", last.rstrip(" 。.!?*"))[-1]
    if not _UNSURE.search(sentence) and (
        found := _IS_THE_ANSWER.fullmatch(sentence.strip())
        or _CHOSEN.fullmatch(sentence.strip())
        or _CONCLUSION.fullmatch(sentence)
    ):
        return Extract(_tidy(found[1]) or None, "last sentence")
    if last == final and len(last) <= 60 and not re.search(r"(?<![\\a-zA-Z])[^\W\d_]{2}", last):
        return Extract(_tidy(last) or None, "bare expression")
    return Extract(None, "no answer")


def code_block(completion: str) -> Extract:
    """The last closed block of Python after the thinking: ```` ```python ````, or a fence without a language."""
    final = after_thinking(completion)
    if final is None:
        return Extract(None, "thinking never ended")
    code: list[str] | None = None
    block: list[str] | None = None
    language = ""
    for line in final.split("\n"):
        fence = line.strip()
        if block is None and fence.startswith("```"):
            block, language = [], fence[3:].strip().lower()
        elif block is not None and fence == "```":
            code, block = (block if language in ("", "py", "python", "python3") else code), None
        elif block is not None:
            block.append(line)
    return Extract("\n".join(code).strip("\n") or None if code else None, "code block")
