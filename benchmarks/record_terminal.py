"""Records what a command shows in a terminal as an animated SVG.

    python benchmarks/record_terminal.py --output=docs/quickstart.svg -- bash scripts/train.sh

The command runs once, in a pseudo-terminal of 110 columns. Long pauses are shortened: the picture plays in
`--seconds`, then begins again. A viewer that cannot animate shows the last screen.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import struct
import sys
import termios
import time
from fcntl import ioctl
from html import escape
from pathlib import Path
from typing import NamedTuple

COLUMNS = 110
ROWS = 24
LINE_HEIGHT = 18  # px
CHARACTER_WIDTH = 7.8  # px, of the monospaced font at 13 px
LONGEST_PAUSE = 1.0  # s of the recording, which `--seconds` then scales
HOLD = 4.0  # s that the last screen stays
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class State(NamedTuple):
    """A line as it looked from `time` (s since the start) on."""

    time: float
    line: int
    text: str


def record(command: list[str]) -> list[tuple[float, str]]:
    """Runs the command in a terminal; returns what it printed, with the seconds since the start.

    Raises:
        SystemExit: the command failed.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"] = str(COLUMNS)
        os.execvp(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    chunks = []
    start = time.monotonic()
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        if not chunk:
            break
        os.write(sys.stderr.fileno(), chunk)
        chunks.append((time.monotonic() - start, chunk.decode(errors="replace")))
    _, status = os.waitpid(pid, 0)
    if status != 0:
        sys.exit(f"{command[0]} ended with status {os.waitstatus_to_exitcode(status)}")
    return chunks


def states(chunks: list[tuple[float, str]]) -> list[State]:
    """Returns each look of each line, with pauses shortened; a progress line has several."""
    found = []
    clock = 0.0
    last = 0.0
    line = 0
    text = ""
    for moment, chunk in chunks:
        clock += min(moment - last, LONGEST_PAUSE)
        last = moment
        for part in re.split(r"(\r*\n|\r)", CONTROL.sub("", chunk)):
            if part.endswith("\n"):
                line += 1
                text = ""
            elif part == "\r":
                text = ""
            elif part:
                text += part
                found.append(State(clock, line, text[:COLUMNS]))
    return found


def thinned(looks: list[State], pause: float) -> list[State]:
    """Drops looks that a later look of the same line replaces within `pause` seconds."""
    kept: list[State] = []
    for look in looks:
        is_same_line = bool(kept) and kept[-1].line == look.line
        if is_same_line and look.time - kept[-1].time < pause:
            kept[-1] = State(kept[-1].time, look.line, look.text)
        else:
            kept.append(look)
    return kept


def svg(looks: list[State], title: str, seconds: float) -> str:
    """Returns the picture: every look is a text that is visible from its time to the next of its line."""
    scale = seconds / max(looks[-1].time, 1e-9)
    looks = thinned(looks, 0.25 / scale)
    period = seconds + HOLD
    width = round(COLUMNS * CHARACTER_WIDTH) + 32
    screen = ROWS * LINE_HEIGHT
    height = screen + 52
    body = []
    for index, look in enumerate(looks):
        begin = look.time * scale
        later = (other.time * scale for other in looks[index + 1 :] if other.line == look.line)
        end = next(later, None)
        shown = "visible" if end is None else "hidden"
        times = [0.0, begin] if end is None else [0.0, begin, end]
        values = "hidden;visible" if end is None else "hidden;visible;hidden"
        y = (look.line + 1) * LINE_HEIGHT
        body.append(
            f'<text y="{y}" visibility="{shown}">{_escaped(look.text)}'
            f'<animate attributeName="visibility" calcMode="discrete" dur="{period:g}s" '
            f'repeatCount="indefinite" values="{values}" keyTimes="{_key_times(times, period)}"/></text>'
        )
    scrolls = {0.0: 0}
    for look in looks:
        scrolls[look.time * scale] = max(0, look.line + 1 - ROWS) * LINE_HEIGHT
    offsets = ";".join(f"0 {-offset}" for offset in scrolls.values())
    final = list(scrolls.values())[-1]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{escape(title)}</title>
<rect width="{width}" height="{height}" rx="8" fill="#16181d"/>
<text x="16" y="24" font-family="monospace" font-size="13" fill="#8b949e">$ {escape(title)}</text>
<svg x="16" y="39" width="{width - 32}" height="{screen}" viewBox="0 5 {width - 32} {screen}">
<g font-family="monospace" font-size="13" fill="#e6edf3" transform="translate(0 {-final})">
<animateTransform attributeName="transform" type="translate" calcMode="discrete" dur="{period:g}s" \
repeatCount="indefinite" values="{offsets}" keyTimes="{_key_times(list(scrolls), period)}"/>
{chr(10).join(body)}
</g>
</svg>
</svg>
"""


def _escaped(text: str) -> str:
    """Returns the text for XML, with spaces that no viewer joins."""
    return escape(text).replace(" ", "\N{NO-BREAK SPACE}")


def _key_times(seconds: list[float], period: float) -> str:
    return ";".join(f"{second / period:.5f}" for second in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=25.0, help="of the picture (default 25)")
    parser.add_argument("command", nargs="+", help="behind --, the command and its arguments")
    args = parser.parse_args()
    looks = states(record(args.command))
    if not looks:
        sys.exit(f"{args.command[0]} printed nothing")
    args.output.write_text(svg(looks, " ".join(args.command), args.seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
