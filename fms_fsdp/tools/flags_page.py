"""The page docs/reference/flags.md, written from the table of flags.

python -m fms_fsdp.tools.flags_page > docs/reference/flags.md
"""

from __future__ import annotations

import inspect
import re
import typing
from typing import Any

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import Flag, help_texts
from fms_fsdp.config.parse import needs_note, rows_by_section, shown_value, split_default
from fms_fsdp.console import printing


def markdown(config_type: type[Any]) -> str:
    """Returns docs/reference/flags.md: a table for each section, and one for its advanced flags."""
    lines = [_PREFACE]
    types = typing.get_type_hints(config_type)
    texts = help_texts(config_type)
    for section, rows in rows_by_section(config_type):
        lines.append(f"\n## {section}\n\n{inspect.cleandoc(types[section].__doc__)}\n")
        advanced = [_table_row(row, texts[row.name]) for row in rows if row.advanced]
        lines += [
            *_TABLE_HEAD,
            *(_table_row(row, texts[row.name]) for row in rows if not row.advanced),
        ]
        if advanced:
            lines += [
                "\nAdvanced: keep the default unless you know why.\n",
                *_TABLE_HEAD,
                *advanced,
            ]
    return "\n".join(lines) + "\n"


def _table_row(row: Flag, text: str) -> str:
    text, default = split_default(row, text)
    is_value = default in ("", shown_value(row.default))
    if is_value or re.fullmatch(r"\S*[\d_<]\S*", default):
        default = f"`{default or 'none'}`"
    kind = "" if row.choices else f" {row.kind.__name__}{',…' if row.is_list else ''}"
    # Markdown drops <N>, and the backslash of \, outside of code
    text = re.sub(r"[\w./]*<\w+>[\w./]*|\\,", r"`\g<0>`", text)
    sentences = [f"{text}{needs_note(row)}."]
    if row.choices:
        sentences.append(f"One of {', '.join(f'`{choice}`' for choice in row.choices)}.")
    marks = [*[row.resume] * (row.resume != "free"), *["name"] * row.in_name]
    sentences += [f"*{', '.join(marks)}*"] if marks else []
    anchor = f'<a id="{row.name}"></a>'
    return f"| {anchor}`--{row.name}`{kind} | {default} | {' '.join(sentences)} |"


_TABLE_HEAD = ("| flag | default | effect |", "|---|---|---|")
_PREFACE = """# Flags

Every flag of `main_training.py`, by section. `python main_training.py --help` shows the most important ones,
`--help=all` all of them. `flags.md#seq_length` links to a flag. (`python -m fms_fsdp.tools.flags_page` writes this page.)

## Set flags

```bash
python main_training.py --model_variant=tiny --use_dummy_dataset=True --num_steps=20 --dry_run
python main_training.py --config=bench --model_variant=tiny --seq_length=128 --num_steps=4 --dry_run
```

Write flags in any order, as `--seq_length=2048` or `--seq-length 2048`. `--config=a.toml,b.toml` reads config
files: a later file replaces the values of an earlier one, and flags replace the values of files. They also
remove another flag for the same thing: `--num_tokens` removes `num_steps` of a file, `--hf_config` removes
`model_variant`, `--warmup` removes `warmup_steps`, `--min_lr` removes `min_lr_ratio`, and new `--datasets` remove
`weights`. A file has flags by name, at its top or in tables named like the sections below. It can also be JSON:
`--config=runs/NAME/config.json` repeats a run. `--config_dir=DIR` is the folder of files that are given by
name only. Presets need no folder: `bench`, `profile`, `continue` (train existing weights on other data),
`quickstart` (the model and sizes of `scripts/train.sh`), `quickstart_text` (its data), `shakespeare`, `pretrain_7b` and the
shapes of GPT-3. Keep one file for the model and one for the site: `--config=model.toml,site.toml`.

Write an integer as `5_000_000`, `4k`, `2M`, `1B`, `4Ki` (4096) or `1e6`, a boolean as `true`/`false`,
`yes`/`no` or `1`/`0` in upper or lower case, and a list as `a,b`. `none` clears an optional value. `~` at the
start of a path is the home directory, in files too; a path with a `$VARIABLE` that the shell has not expanded
is an error. An unknown name is an error that names a similar flag, also for flags of other programs. A flag that is given
twice must have the same value both times. A flag without effect is an error if only the command line causes
it, otherwise a note in the log. All checks run before any work: flags, world and mesh, data, memory.
`--dry_run` runs them, prints a summary of the launch and writes nothing.

## Marks

- *fixed*: a resumed run must have the same value; another one is an error. The flags of the model together must
  give the model of the checkpoint.
- *logged*: another value on a resumed run takes effect from that step, and is logged. Without *fixed* or *logged*,
  another value does not change the training.
- *name*: the default run name depends on the flag. If it changes, the command starts another run, unless
  `--run_name` or `--output_dir` is set."""

if __name__ == "__main__":
    with printing():
        print(markdown(TrainConfig), end="")
