"""The page docs/configuration.md, written from the table of flags.

python -m fms_fsdp.tools.flags_page > docs/configuration.md
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

from fms_fsdp.config import TrainConfig
from fms_fsdp.config.flag import Flag
from fms_fsdp.errors import printing
from fms_fsdp.flags import of_part, sections_of, shown_value, type_name


def markdown(config_type: type[Any]) -> str:
    """docs/configuration.md: a table for each section, and one for its advanced flags."""
    lines, types = [_PREFACE], typing.get_type_hints(config_type)
    for section, rows in sections_of(config_type):
        lines.append(f"\n## {section}\n\n{inspect.cleandoc(types[section].__doc__)}\n")
        advanced = [_table_row(row) for row in rows if row.advanced]
        lines += [*_TABLE_HEAD, *(_table_row(row) for row in rows if not row.advanced)]
        if advanced:
            lines += ["\nAdvanced: keep the default unless you know why.\n", *_TABLE_HEAD, *advanced]
    return "\n".join(lines) + "\n"


def _table_row(row: Flag) -> str:
    choices = f" One of {', '.join(f'`{choice}`' for choice in row.choices)}." if row.choices else ""
    cells = [f"`--{row.name}`", type_name(row), f"`{shown_value(row.default)}`", row.resume]
    return f"| {' | '.join([*cells, 'yes' if row.in_name else '', row.help])}{of_part(row)}.{choices} |"


_TABLE_HEAD = ("| flag | type | default | on resume | in the name | meaning |", "|---|---|---|---|---|---|")
_PREFACE = """# Configuration

`python -m fms_fsdp.tools.flags_page` writes this page; a test checks that it agrees with the code.

Write flags in any order, as `--seq_length=2048` or `--seq-length 2048`. `--config=a.toml,b.toml` reads files
of flags. A later file replaces the values of an earlier one, and flags replace the values of files. A file
holds flags by name, at its top or in tables that have the names of the sections below. The file can also be
JSON: `--config=runs/NAME/config.json` repeats a run. `--config_dir=DIR` names the folder in which a file with
a bare name is looked for. The package ships overlays, which need no folder: `bench`, `profile`, `continue`
(train finished weights on other data), `pretrain_7b` and the shapes of GPT-3. It is useful to keep one file
for the model and one for the site: `--config=model.toml,site.toml`.

You can write an integer as `5_000_000`, `4k`, `2M`, `1B`, `4Ki` (4096) or `1e6`, a boolean as `true`/`false`,
`yes`/`no` or `1`/`0` in upper or lower case, and a list as `a,b`. `none` clears a value that can be absent. A
name that is not a flag is an error. It names the most similar flag, or says what the name of another program
is here. A flag that is given twice must have the same value both times. A flag of the command line must have
an effect. If other flags of the command line prevent it, the launch is refused. If a file, the machine or the
number of ranks prevents it, the log has a note. All checks run before any work, in this order: flags, world
and mesh, data, memory. `--dry_run` beside the flags of a launch makes all these checks, says what the launch
would do and ends; nothing is written. `--dry_run` is no flag of a run: no file and no name holds it.

The column "on resume" says what happens if a run goes on from a checkpoint and the flag has another value.
`free`: the run trains the same. `announced`: the new value takes effect from that step on, and the log says
so. `refused`: the launch ends with one line. The flags of the model together must give the model of the
checkpoint.

The column "in the name" marks the flags that the default run name is made of. If one of them changes, the
command names another run, unless `--run_name` or `--output_dir` is given. Any other flag can change from
launch to launch, and the run goes on.

"(part: NAME)" marks the flags of an optional part, whose code, `fms_fsdp/extras/NAME`, is imported only by a
run that chooses it."""

if __name__ == "__main__":
    with printing():
        print(markdown(TrainConfig), end="")
