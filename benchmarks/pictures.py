"""Makes pictures of docs/.

    python benchmarks/pictures.py memory docs/guides/memory.svg
    python benchmarks/pictures.py report RUN docs/report.png     # requires Chromium

The first draws numbers of `estimate`, which are predictions: nothing is trained. The second is a screenshot of the
first charts of a run's report page. `picture` is the look of all drawings, also of judge_plan.py.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from fms_fsdp.errors import UserError

SHAPE = ("llama3_8b", "h100_80gb", 8)  # model, device, number of devices
BATCH = "4 × 2 sequences of 4,096 tokens per GPU and step"
FLAGS = "--seq_length=4096 --batch_size=2 --grad_accum_steps=4"
# label of a bar → the flags that differ
BARS = {
    "ddp": "--sharding_strategy=ddp",
    "zero1": "--sharding_strategy=zero1",
    "zero2": "--sharding_strategy=zero2",
    "fsdp": "--sharding_strategy=fsdp",
    "fsdp,\ncheap": "--sharding_strategy=fsdp --recompute=cheap",
    "fsdp,\nblocks": "--sharding_strategy=fsdp --recompute=blocks",
    "fsdp,\ncheap,\nbf16_pure": "--sharding_strategy=fsdp --recompute=cheap --precision=bf16_pure",
}
# legend of a part → the kinds of fms_fsdp.predict.memory.Memory in it
PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "gathered weights": ("gathered",),
    "activations": ("activations",),
    "other": ("sequences", "working", "allocator"),
}
COLORS = ("#2563d9", "#d4480b", "#1f8a4c", "#0b7f99", "#c9a227", "#9aa6b6")

SCALE = 2  # pixels of the screenshot per CSS pixel
WIDTH = 1100  # CSS pixels: two columns of charts
NUM_CHARTS = 4
PAGE_PADDING = 20  # CSS pixels, of report.html
MAX_HEIGHT = 1400


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yields the axes of a drawing and writes it; equal calls write equal files.

    size   width and height in inches
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 11}
    with matplotlib.rc_context(settings):  # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        yield figure.add_subplot()
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=110, metadata=metadata)


def memory_of(flags: str) -> dict[str, float]:
    """Returns the GiB of each part that `estimate` predicts for a rank."""
    from fms_fsdp.config.parse import parse_flags
    from fms_fsdp.tools.estimate_command import estimate
    from fms_fsdp.tools.tool_flags import EstimateConfig

    model, device, num_devices = SHAPE
    argv = [f"--model_variant={model}", f"--device={device}", f"--num_devices={num_devices}"]
    config = parse_flags(EstimateConfig, [*argv, *FLAGS.split(), *flags.split()])
    memory = vars(estimate(config).memory)
    return {part: sum(memory[kind] for kind in kinds) / 2**30 for part, kinds in PARTS.items()}


def draw_memory(path: Path) -> None:
    """Draws the predicted memory of a rank, a bar per strategy."""
    from fms_fsdp.predict.devices import find_device

    model, device, num_devices = SHAPE
    limit = find_device(device).memory_gib
    bars = [memory_of(flags) for flags in BARS.values()]
    with picture(path, (8, 5.5)) as axes:
        below = [0.0] * len(bars)
        for part, color in zip(PARTS, COLORS, strict=True):
            heights = [bar[part] for bar in bars]
            axes.bar(list(BARS), heights, bottom=below, label=part, color=color, width=0.7)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        for number, total in enumerate(below):
            axes.annotate(f"{total:.0f}", (number, total), ha="center", va="bottom")
        axes.axhline(limit, color="black", linewidth=1, linestyle="--")
        name = device.partition("_")[0].upper()
        axes.annotate(
            f"{limit:g} GiB of an {name}", (len(bars) - 0.6, limit), ha="right", va="bottom"
        )
        axes.set(
            title=f"{model} on {num_devices} {name}s, {BATCH}\npredicted by estimate, not measured",
            xlabel="--sharding_strategy, --recompute, --precision",
            ylabel="GiB per GPU",
        )
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(loc="upper right")


def photograph_report(run: Path, path: Path) -> None:
    """Writes a screenshot of header, tiles and first charts of a run's report page.

    Raises:
        UserError: Chromium is not installed, or the folder holds no run.
    """
    from PIL import Image, ImageChops

    from fms_fsdp.tools.report_command import load_run, render

    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        raise UserError("the picture of a report requires chromium; install it")
    style = f"<style>figure:nth-of-type(n + {NUM_CHARTS + 1}), #tables {{ display: none; }}</style>"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(render([load_run(run)]).replace("</head>", style + "</head>"), "utf-8")
        shot = Path(folder, "page.png")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--force-device-scale-factor={SCALE}", f"--window-size={WIDTH},{MAX_HEIGHT}"]
        command = [browser, *options, f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        image = Image.open(shot).convert("RGB")
    background = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, background).getbbox()
    assert box is not None, "the page is empty"
    bottom = min(image.height, box[3] + SCALE * PAGE_PADDING)
    image.crop((0, 0, image.width, bottom)).quantize(128, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def main(argv: Sequence[str]) -> int:
    """Makes the picture that the arguments name; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    memory = commands.add_parser("memory", help="memory of a rank by strategy")
    memory.add_argument("output", type=Path)
    report = commands.add_parser("report", help="screenshot of a report page")
    report.add_argument("run", type=Path)
    report.add_argument("output", type=Path)
    options = parser.parse_args(argv)
    try:
        if options.command == "memory":
            draw_memory(options.output)
        else:
            photograph_report(options.run, options.output)
    except (UserError, OSError) as error:
        print(f"pictures: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
