"""Expressions in LaTeX or plain text, as trees: a parser that knows a fixed list of things and evaluates nothing."""

import re
from dataclasses import dataclass

MAX_DEPTH = 40
MAX_TOKENS = 400

FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg",
    "exp", "sqrt", "abs", "floor", "ceil",
}  # fmt: skip
CONSTANTS = {"pi", "e", "i", "infty", "circ"}


class UnreadableError(ValueError):
    """The text is not an expression that this parser knows."""


@dataclass(frozen=True)
class Node:
    """``op`` with its operands; of ``number`` and ``symbol`` the text is in ``name``."""

    op: str
    args: tuple["Node", ...] = ()
    name: str = ""


_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+(?![\w.]))?|\.\d+)"
    r"|\\([a-zA-Z]+)|([a-zA-Z]+|[α-ωΑ-Ω])|(\*\*|[-+*/^_!(){}\[\]|=]))"
)
_NUMBER, _COMMAND, _LETTERS, _SIGN = 1, 2, 3, 4


def _tokens(text: str) -> list[tuple[int, str]]:
    tokens: list[tuple[int, str]] = []
    at, text = 0, text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or len(tokens) > MAX_TOKENS:
            raise UnreadableError(text[at : at + 20])
        kind, value = found.lastindex or 0, found[found.lastindex or 0]
        if kind == _LETTERS and value.lower() not in FUNCTIONS and value.lower() != "pi":
            if len(value) > 4:
                raise UnreadableError(value)
            tokens += [(_LETTERS, letter) for letter in value]  # xy is x times y
        elif kind == _LETTERS:
            tokens.append((_COMMAND, value.lower()))
        elif value == "**":
            tokens.append((_SIGN, "^"))
        else:
            tokens.append((kind, value))
        at = found.end()
    return tokens


_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "theta", "lambda", "mu", "nu", "rho", "sigma", "tau",
    "phi", "varphi", "omega", "Delta", "Omega", "Phi", "Gamma", "Lambda", "Sigma", "Theta", "eta", "zeta", "xi", "psi",
    "kappa", "chi", "ell",
}  # fmt: skip
_ATOMS = {"frac", "binom", "sqrt", "sum", "prod", "lfloor", "lceil", "lvert", "pi", "infty"} | FUNCTIONS | _GREEK


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens, self.at, self.depth = _tokens(text), 0, 0

    def peek(self, ahead: int = 0) -> tuple[int, str]:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else (0, "")

    def take(self, value: str | None = None) -> tuple[int, str]:
        token = self.peek()
        if not token[0] or (value is not None and token[1] != value):
            raise UnreadableError(f"{value or 'more'} is missing")
        self.at += 1
        return token

    def took(self, *values: str) -> str | None:
        token = self.peek()
        if token[0] in (_SIGN, _COMMAND) and token[1] in values:
            self.at += 1
            return token[1]
        return None

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        node = self.product()
        while sign := self.took("+", "-"):
            node = Node("add" if sign == "+" else "sub", (node, self.product()))
        if self.took("bmod", "mod"):
            node = Node("mod", (node, self.product()))
        self.depth -= 1
        return node

    def product(self) -> Node:
        node = self.signed()
        while True:
            if self.took("*", "cdot", "times"):
                node = Node("mul", (node, self.signed()))
            elif self.took("/", "div"):
                node = Node("div", (node, self.signed()))
            elif self.starts_atom():
                if self.peek()[0] == _NUMBER:
                    raise UnreadableError("a number after a factor")
                node = Node("mul", (node, self.power()))
            else:
                return node

    def starts_atom(self) -> bool:
        kind, value = self.peek()
        return (
            kind in (_NUMBER, _LETTERS) or (kind == _COMMAND and value in _ATOMS) or (kind == _SIGN and value in "({[")
        )

    def signed(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        if sign := self.took("-", "+"):
            node = self.signed()
            node = Node("neg", (node,)) if sign == "-" else node
        else:
            node = self.power()
        self.depth -= 1
        return node

    def power(self) -> Node:
        node = self.atom()
        while True:
            if self.took("!"):
                node = Node("factorial", (node,))
            elif self.took("^"):
                if self.peek() == (_COMMAND, "circ") or [self.peek(i)[1] for i in range(3)] == ["{", "circ", "}"]:
                    self.at += 1 if self.peek()[1] == "circ" else 3
                    node = Node("degrees", (node,))
                else:
                    node = Node("pow", (node, self.exponent()))
            elif self.took("circ"):
                node = Node("degrees", (node,))
            else:
                return node

    def exponent(self) -> Node:
        if self.peek() == (_SIGN, "{") or self.peek() == (_SIGN, "("):
            base = self.atom()
        elif sign := self.took("-", "+"):  # 2^-3
            base = self.exponent()
            return Node("neg", (base,)) if sign == "-" else base
        else:
            base = self.atom()
        return Node("pow", (base, self.exponent())) if self.took("^") else base

    def group(self) -> Node:
        """An argument of a command: ``{...}`` or one token."""
        if self.took("{"):
            node = self.sum()
            self.take("}")
            return node
        return self.atom()

    def atom(self) -> Node:
        kind, value = self.take()
        if kind == _NUMBER:
            whole, start = Node("number", name=value), self.at
            if value.isdigit() and self.took("frac"):
                part = self.command("frac")
                if all(arg.op == "number" for arg in part.args):
                    return Node("add", (whole, part))  # 2\frac{1}{3} is 7/3
                self.at = start
            return whole
        if kind == _LETTERS:
            return self.symbol(value)
        if kind == _SIGN and value in "({[|":
            node = self.sum()
            self.take({"(": ")", "{": "}", "[": "]", "|": "|"}[value])
            return Node("abs", (node,)) if value == "|" else node
        if kind == _COMMAND:
            return self.command(value)
        raise UnreadableError(value)

    def symbol(self, name: str) -> Node:
        if self.took("_"):
            kind, value = self.take()
            if value == "{":
                inner = []
                while self.peek()[1] != "}":
                    inner.append(self.take()[1])
                self.take("}")
                value = "".join(inner)
            elif kind == _SIGN:
                raise UnreadableError("subscript")
            return Node("symbol", name=f"{name}_{value}")
        return Node(name) if name in ("e", "i") else Node("symbol", name=name)

    def command(self, name: str) -> Node:
        if name in ("frac", "binom"):
            return Node("div" if name == "frac" else "binom", (self.group(), self.group()))
        if name == "sqrt":
            if self.took("["):
                index = self.sum()
                self.take("]")
                return Node("root", (self.group(), index))
            return Node("root", (self.group(), Node("number", name="2")))
        if name in ("sum", "prod"):
            return self.series(name)
        if name in ("lfloor", "lceil", "lvert"):
            node = self.sum()
            self.take({"lfloor": "rfloor", "lceil": "rceil", "lvert": "rvert"}[name])
            return Node({"lfloor": "floor", "lceil": "ceil", "lvert": "abs"}[name], (node,))
        if name in ("pi", "infty"):
            return Node(name)
        if name in _GREEK:
            return self.symbol(name)
        if name in FUNCTIONS:
            return self.function(name)
        raise UnreadableError(name)

    def function(self, name: str) -> Node:
        base = self.group() if self.took("_") else None
        power = self.exponent() if self.took("^") else None
        if self.peek() == (_SIGN, "("):
            argument = self.atom()
        else:  # \sin 2x
            argument = self.power()
            while self.starts_atom() and self.peek()[1] not in FUNCTIONS and self.peek()[1] not in "([":
                argument = Node("mul", (argument, self.power()))
        if power is not None and power == Node("neg", (Node("number", name="1"),)):
            raise UnreadableError("an inverse function")
        node = Node(name, (argument,)) if base is None else Node(name, (argument, base))
        return node if power is None else Node("pow", (node, power))

    def series(self, name: str) -> Node:
        r"""``\sum_{k=1}^{n} term``: index, first, last, term."""
        self.take("_")
        self.take("{")
        index = self.atom()
        if index.op not in ("symbol", "i") or self.peek()[1] != "=":
            raise UnreadableError("index of a series")
        self.take()
        first = self.sum()
        self.take("}")
        self.take("^")
        last = self.group()
        return Node(name, (index, first, last, self.product()))


def parse(text: str) -> Node:
    """The tree of an expression; UnreadableError for all that is not one. ``text`` is normalised."""
    parser = _Parser(text)
    node = parser.sum()
    if parser.peek()[0]:
        raise UnreadableError(parser.peek()[1])
    return node


def symbols(node: Node) -> frozenset[str]:
    """The free symbols of a tree."""
    if node.op == "symbol":
        return frozenset({node.name})
    found = frozenset().union(*(symbols(arg) for arg in node.args)) if node.args else frozenset()
    return found - {node.args[0].name} if node.op in ("sum", "prod") else found
