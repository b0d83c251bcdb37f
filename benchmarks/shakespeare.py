"""Trains a model of Shakespeare's characters, here and with nanoGPT: same text, split, sizes and steps.

    git clone https://github.com/karpathy/nanoGPT
    curl -LO https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    python benchmarks/shakespeare.py --nanogpt=nanoGPT --text=input.txt

nanoGPT runs the command of its README for a computer without a GPU, and ours `--config=shakespeare`. The two take
turns, `--rounds` times; ours with another seed each time, nanoGPT always with its own. Seconds are those of
the whole command, from its start to its end, evaluations and the last checkpoint included.

The validation loss, in nats per character, is over all of the last tenth of the text, in blocks of 64 characters
(nanoGPT prints the mean over 240 random blocks). nanoGPT's is computed by its own model from its checkpoint,
ours by `evaluate`. Without --nanogpt, only ours is trained. nanoGPT's prepare.py imports requests.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import about_machine, parser_of, write_result

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 64  # characters of context
MAX_BLOCKS = 10_000  # more than the text has: an evaluation reads at most one epoch
# The command of nanoGPT's README "I only have a macbook (or other cheap computer)". The last checkpoint is
# saved even if an earlier one was better, as ours is.
NANOGPT = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1"
    " --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
    " --always_save_checkpoint=True"
).split()
# Runs in nanoGPT's folder; prints the step of the checkpoint, parameters and validation loss.
EVALUATE_NANOGPT = f"""
import numpy, torch
from model import GPT, GPTConfig
saved = torch.load("out-shakespeare-char/ckpt.pt", map_location="cpu")
model = GPT(GPTConfig(**saved["model_args"])).eval()
model.load_state_dict(saved["model"])
tokens = torch.from_numpy(numpy.fromfile("data/shakespeare_char/val.bin", dtype=numpy.uint16).astype(numpy.int64))
num_blocks = (len(tokens) - 1) // {BLOCK}
inputs = tokens[: num_blocks * {BLOCK}].view(-1, {BLOCK})
labels = tokens[1 : num_blocks * {BLOCK} + 1].view(-1, {BLOCK})
with torch.no_grad():
    total = sum(model(x, y)[1].item() * len(x) for x, y in zip(inputs.split(12), labels.split(12)))
num_params = sum(each.numel() for each in model.parameters())
print(saved["iter_num"], num_params, total / num_blocks)
"""


def main() -> None:
    args = parser_of(__doc__, nanogpt="", text="input.txt", rounds=2, num_steps=2000).parse_args()
    text = Path(args.text).read_text(encoding="ascii")
    rounds: list[dict[str, Any]] = []
    result = about_machine() | {"characters": len(text), "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(text, Path(folder))
        nanogpt = copy_nanogpt(args.nanogpt, text, Path(folder)) if args.nanogpt else None
        for seed in range(1, args.rounds + 1):
            one = {"ours": train_ours(data, Path(folder) / f"run-{seed}", args.num_steps, seed)}
            if nanogpt is not None:
                one["nanogpt"] = train_nanogpt(nanogpt, args.num_steps)
            rounds.append(one)
            print(json.dumps(one), flush=True)
    result["median"] = {
        name: {
            key: statistics.median(one[name][key] for one in rounds)
            for key in ("seconds", "val_loss")
        }
        for name in rounds[0]
    }
    print("| | parameters | validation loss | seconds |\n|---|---:|---:|---:|")
    for name, median in result["median"].items():
        num_params = rounds[0][name]["parameters"]
        print(f"| {name} | {num_params:,} | {median['val_loss']:.3f} | {median['seconds']:.0f} |")
    write_result(result, args.output)


def run(command: list[str], folder: Path) -> tuple[float, str]:
    """Returns the seconds and the stdout of a command of this Python.

    Raises:
        SystemExit: it failed; its stderr stands above.
    """
    start = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    if ended.returncode != 0:
        raise SystemExit(f"error: {' '.join(command[:3])} ended with status {ended.returncode}")
    return time.perf_counter() - start, ended.stdout


def prepare(text: str, folder: Path) -> Path:
    """Returns the folder of token shards: nine tenths to train on, the last one to validate."""
    border = len(text) * 9 // 10
    for name, part in (("train", text[:border]), ("val", text[border:])):
        (folder / f"{name}.txt").write_text(part, encoding="ascii")
    sources = f"train={folder}/train.txt,val={folder}/val.txt"
    data = folder / "shards"
    command = ["-m", "fms_fsdp", "prepare", f"--input={sources}", "--tokenizer=byte"]
    run([*command, f"--output={data}"], ROOT)
    return data


def train_ours(data: Path, output: Path, num_steps: int, seed: int) -> dict[str, Any]:
    """Returns parameters, seconds and validation loss of a run of this project."""
    preset = ["--config=shakespeare", f"--data_path={data}", f"--output_dir={output}"]
    settings = [f"--num_steps={num_steps}", f"--seed={seed}"]
    seconds, _ = run(["main_training.py", *preset, *settings], ROOT)
    command = ["-m", "fms_fsdp", "evaluate", f"--path={output}", "--json=True", "--batch_size=1"]
    _, answer = run([*command, f"--eval_steps={MAX_BLOCKS}"], ROOT)
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    num_params = config["resolved"]["model"]["num_params"]
    return {
        "parameters": num_params,
        "val_loss": json.loads(answer)["eval/loss"],
        "seconds": seconds,
    }


def copy_nanogpt(clone: str, text: str, folder: Path) -> Path:
    """Returns a copy of nanoGPT with its prepared text."""
    copy = folder / "nanogpt"
    shutil.copytree(clone, copy, ignore=shutil.ignore_patterns(".git"))
    (copy / "data/shakespeare_char/input.txt").write_text(text, encoding="ascii")
    run(["data/shakespeare_char/prepare.py"], copy)
    return copy


def train_nanogpt(copy: Path, num_steps: int) -> dict[str, Any]:
    """Returns parameters, seconds and validation loss of a run of nanoGPT."""
    length = [f"--max_iters={num_steps}", f"--lr_decay_iters={num_steps}"]
    seconds, _ = run([*NANOGPT, *length], copy)
    _, answer = run(["-c", EVALUATE_NANOGPT], copy)
    step, num_params, val_loss = answer.split()[-3:]
    if int(step) != num_steps:  # it saves after 250, 500, … steps
        raise SystemExit(f"error: nanoGPT's checkpoint is of step {step}; set --num_steps={step}")
    return {"parameters": int(num_params), "val_loss": float(val_loss), "seconds": seconds}


if __name__ == "__main__":
    main()
