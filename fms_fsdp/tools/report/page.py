"""`python -m fms_fsdp report RUN [RUN …]`: one HTML page of a run, or of several compared.

The page needs no network and no server; `--serve` renews it while a run goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.atomic import write_atomically
from fms_fsdp.config import flag
from fms_fsdp.errors import UserError
from fms_fsdp.tools.report.facts import cards, command, subtitle, tables
from fms_fsdp.tools.report.history import RunHistory, differences, read_run
from fms_fsdp.tools.report.panels import Panel, build_panels
from fms_fsdp.tools.report.svg import draw, text

REFRESH_S = 5  # of a page that is served


@dataclass(frozen=True)
class ReportConfig:
    """A page of curves and tables from run folders."""

    runs: tuple[str, ...] = flag(
        (), "run folders; several runs are compared", positional=True, form="path"
    )
    output: str = flag("", "the page (default: report.html in the first run folder)", form="path")
    serve: bool = flag(
        False, "write no file; show the page in a browser and renew the page during the run"
    )
    host: str = flag(
        "127.0.0.1", "address of --serve; with 0.0.0.0 other machines see the page too"
    )
    port: int = flag(8080, "port of --serve; 0 takes any free port", min=0, max=65535)

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("runs () must name at least one run folder; write `report RUN [RUN …]`")
        if self.serve and self.output:
            raise UserError("--serve (True) writes no file; leave --output out")


def main(config: ReportConfig) -> None:
    """Writes the page and prints its path, or serves it.

    Raises:
        UserError: no run can be drawn, or the port cannot be used.
        OSError: the page cannot be written.
    """
    runs = read_runs(config.runs)
    if config.serve:
        from fms_fsdp.tools.report.serve import serve

        folders = [run.folder for run in runs]
        serve(
            folders,
            lambda: render_page(read_runs(config.runs), REFRESH_S),
            config.host,
            config.port,
        )
        return
    write_page(Path(config.output or runs[0].folder / "report.html"), render_page(runs))


def read_runs(folders: Sequence[str]) -> list[RunHistory]:
    """The histories of the run folders; what cannot be drawn is left out with a note.

    Runs of one name are called by their folders. Raises: UserError, if none can be drawn.
    """
    runs, problems = list[RunHistory](), list[UserError]()
    for folder in dict.fromkeys(folders):
        try:
            runs.append(read_run(Path(folder)))
        except UserError as error:
            problems.append(error)
    if not runs:
        raise problems[0]
    for problem in problems:
        print(f"note: left out: {problem}", file=sys.stderr)
    names = [run.name for run in runs]
    for run in runs:
        run.name = str(run.folder) if names.count(run.name) > 1 else run.name
    return runs


def render_page(runs: Sequence[RunHistory], refresh_s: int = 0) -> str:
    """The page; one that is served asks every `refresh_s` seconds whether it has changed."""
    parts = _opening(runs[0]) if len(runs) == 1 else _comparison(runs)
    parts.append(f'<div class="charts">{draw(build_panels(runs))}</div>')
    parts += [_section(run, run.name if len(runs) > 1 else "") for run in runs]
    return fill_page(text(", ".join(run.name for run in runs)), "\n".join(parts), refresh_s)


def write_charts(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Writes a page of these charts alone, and prints its path. Raises: OSError."""
    charts = f'<h1>{text(title)}</h1><div class="charts">{draw(panels)}</div>'
    write_page(path, fill_page(text(title), charts))


def write_page(path: Path, page: str) -> None:
    """Writes the page, and prints its path. Raises: OSError."""
    content = page.encode()  # before the file is opened: an error leaves the older page
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_bytes(content)
    else:
        write_atomically(path, content)
    print(path)


def fill_page(title: str, content: str, refresh_s: int = 0) -> str:
    """A page with this title and content, both HTML."""
    opening, ending = Path(__file__).with_name("page.html").read_text().split("$content")
    return opening.replace("$refresh_s", str(refresh_s)).replace("$title", title) + content + ending


def _opening(run: RunHistory) -> list[str]:
    """The name of a run and its cards."""
    parts = [
        f'<h1>{text(run.name)}</h1><p class="muted">{text(subtitle(run))}</p><div class="cards">'
    ]
    for label, figure, note in cards(run):
        parts.append(
            f'<div class="card">{label}<b>{text(figure)}</b><small>{text(note)}</small></div>'
        )
    return [*parts, "</div>"]


def _comparison(runs: Sequence[RunHistory]) -> list[str]:
    """The flags that differ, then the figures of the cards, a run a row."""
    flags = [
        ("flag", *(run.name for run in runs)),
        *differences({run.name: run.config for run in runs}),
    ]
    figures = list[dict[str, str]]()
    for run in runs:
        figures.append({"run": run.name} | {label: figure for label, figure, _ in cards(run)})
    labels = dict.fromkeys(label for found in figures for label in found)
    results = [tuple(labels), *(tuple(map(found.get, labels)) for found in figures)]
    return [
        f"<h1>{len(runs)} runs</h1>",
        _table("Flags that differ", flags),
        _table("Results", results),
    ]


def _section(run: RunHistory, name: str) -> str:
    """What stands below the curves: a sample, the command, tables that have rows."""
    words = " ".join(f"<span>{text(word)}</span>" for word in command(run))
    parts = [f"<h1>{text(name)}</h1>"] if name else []
    parts += [f"<h2>Sample</h2><pre>{text(run.sample)}</pre>"] if run.sample else []
    parts += [f"<h2>Command</h2><pre>{words}</pre>"] if words else []
    parts += [_table(title, rows) for title, rows in tables(run).items() if len(rows) > 1]
    return "\n".join(parts)


def _table(title: str, rows: Sequence[Sequence[str | None]]) -> str:
    """A table that scrolls in its own box, its head first."""
    lines = []
    for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False):
        cells = f"</{tag}><{tag}>".join(text(cell or "–") for cell in row)
        lines.append(f"<tr><{tag}>{cells}</{tag}></tr>")
    box = f'<div class="scroll {title.lower()}"><table>{"".join(lines)}</table></div>'
    return f"<h2>{title}</h2>{box}"
