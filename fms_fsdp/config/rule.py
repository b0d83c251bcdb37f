"""A rule of a launch is a row: which flag the rule is about, whether it holds, and what a user reads if not.

    Rule("keep_best", lambda config: …, "compares validation losses", "set --eval_interval")
    → error: --keep_best (3) compares validation losses; set --eval_interval

Rules are judged by `judge` as soon as what they ask for is known, before any work. `--rules` of a training
lists them. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fms_fsdp.config.values import joined, one_line, shown
from fms_fsdp.errors import UserError

Known = TypeVar("Known")


@dataclass(frozen=True)
class Rule(Generic[Known]):
    """One refusal. The line that a user reads is `--flag (value) text; remedy`.

    `flag`: what the rule is about; where that is no flag, in words. `holds` gets what is known when the rule
    is judged. `{name}` in the text and the remedy stands for the value of a flag, or for an entry of `facts`,
    which comes first. `beside`: the other flags that the rule is about, separated by spaces. `is_note`: the
    flag has no effect, which is refused only where all these flags were typed.
    """

    flag: str
    holds: Callable[[Known], Any]
    text: str
    remedy: str = ""
    beside: str = ""
    facts: Callable[[Known], Mapping[str, Any]] = lambda known: {}
    is_note: bool = False

    @property
    def subject(self) -> str:
        """The flag as it is typed, or the words in its place."""
        return f"--{self.flag}" if self.flag.isidentifier() else self.flag

    @property
    def template(self) -> str:
        """What follows the flag and its value, with the names of values in braces."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text

    def broken_by(self, known: Known, values: Mapping[str, Any]) -> str:
        """The line for the user where the rule does not hold; `values`: of the flags, by name."""
        told = {name: shown(joined(value)) for name, value in values.items()}
        told |= {name: one_line(joined(value)) for name, value in self.facts(known).items()}
        return f"{self.subject} ({told[self.flag]}) {self.template.format_map(told)}"


def judge(rules: Iterable[Rule[Known]], known: Known, values: Mapping[str, Any]) -> None:
    """Raises UserError for the first rule that does not hold; `values`: of the flags, by name."""
    for rule in rules:
        if not rule.holds(known):
            raise UserError(rule.broken_by(known, values))
