"""What `prepare` and `convert` read, kept and left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fms_fsdp.tools.prepare.documents import Document, Problem
from fms_fsdp.tools.table import table

_SHOWN_BAD = 5


@dataclass
class Stats:
    """Sums over records, as the journal keeps them.

    `lengths[b]` counts texts of [2^(b-1), 2^b) tokens; b is a text, because a key of JSON is one.
    """

    records: int = 0
    documents: int = 0
    tokens: int = 0
    chars: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    lengths: Counter[str] = field(default_factory=Counter)

    def leave_out(self, problem: Problem) -> None:
        """Counts a record that is no document."""
        self.records += 1
        self.left_out[problem.reason] += 1
        if problem.malformed:
            self.num_bad += 1
            self.bad = [*self.bad, f"{problem.where} {problem.reason}"][:_SHOWN_BAD]

    def keep(self, num_tokens: int, document: Document | None) -> None:
        """Counts a document of `num_tokens`, and its text where there is one."""
        self.records += 1
        self.documents += 1
        self.tokens += num_tokens
        self.lengths[str(num_tokens.bit_length())] += 1
        if document is not None:
            self.chars += len(document.text)
            self.num_bytes += len(document.data)

    @staticmethod
    def merge(contents: Iterable[Mapping[str, Any]]) -> Stats:
        """The sums of several, each as `vars` or the journal gives it."""
        total = Stats()
        for content in contents:
            for name, value in content.items():
                if isinstance(own := getattr(total, name), Counter):
                    own.update(value)
                else:
                    setattr(total, name, own + value)
        total.bad = total.bad[:_SHOWN_BAD]
        return total

    def reasons(self) -> str:
        """Why records were left out, the most frequent first."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.most_common())


def describe(stats: Mapping[str, Stats]) -> str:
    """What was read, kept and left out by source, and a histogram of document lengths."""
    total, rows, bars = Stats.merge(map(vars, stats.values())), list[Sequence[str]](), list[Sequence[str]]()
    for name, part in [*stats.items(), ("total", total)]:
        per_token = f"{part.chars / part.tokens:.2f}" if part.chars else "–"  # ids came without their text
        per_document = part.tokens / max(1, part.documents)
        numbers = f"{part.documents:,}", f"{part.tokens:,}", per_token, f"{per_document:,.0f}"
        rows.append((name, *numbers, part.reasons() or "nothing"))
    buckets, most = list(map(int, total.lengths)) or [0], max(total.lengths.values(), default=1)
    for bucket in range(min(buckets), max(buckets) + 1):
        low, high, count = (1 << bucket) >> 1, (1 << bucket) - 1, total.lengths[str(bucket)]
        bars.append((f"{low:,}–{high:,}", f"{count:,}", "#" * (40 * count // most)))
    lines = [table(("source", "documents", "tokens", "chars/token", "tokens/doc", "left out"), rows, (0, 5))]
    lines.append(table(("tokens per document", "documents", ""), bars, text_columns=(2,)))
    for part in stats.values():
        lines += map("malformed: {}".format, part.bad)
    return "\n".join(lines)
