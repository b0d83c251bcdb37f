"""Measures decoding and prefill of our models against transformers' `generate` on the same weights.

    python benchmarks/bench_generate.py [--variants=quickstart,194m --tokens=64 --prefill=512 --rounds=3]

Tokens per second, fp32 and bf16: greedy decoding of --tokens in batches of 1 and 16 after a short prompt, and
prefill of one prompt of --prefill tokens. The reference runs with its defaults and with a static cache. The
programs are interleaved in each round; a value is the median over rounds. Without the package transformers
only our half runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from result_file import about_machine, parser_of, write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from fms_fsdp.generate import Sampling, generate  # noqa: E402
from fms_fsdp.hf.families import config_to_hf  # noqa: E402
from fms_fsdp.hf.weights import fuse, weight_map  # noqa: E402
from fms_fsdp.models.init import init_weights  # noqa: E402
from fms_fsdp.models.llama import Llama  # noqa: E402
from fms_fsdp.models.variants import VARIANTS  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT, BATCHES = 32, (1, 16)  # tokens before decoding; rows
Write = Callable[[torch.Tensor, int], Any]  # prompts, new tokens


def our_writer(model: Llama) -> Write:
    greedy = Sampling(temperature=0)
    return lambda tokens, count: list(
        generate(model, tokens.tolist(), greedy, max_new_tokens=count)
    )


def their_writer(model: Any, cache: str | None) -> Write:
    def write(tokens: torch.Tensor, count: int) -> Any:
        more = {} if cache is None else {"cache_implementation": cache}
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        mask = torch.ones_like(tokens)
        return model.generate(
            tokens, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths, **more
        )

    return write


def their_model(model: Llama) -> Any:
    """Builds transformers' model with the same weights, by the table of our export."""
    import json

    from transformers import AutoConfig, AutoModelForCausalLM

    content = config_to_hf(model.config)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(content), encoding="utf-8")
        auto: Any = AutoModelForCausalLM
        theirs = auto.from_config(AutoConfig.from_pretrained(folder)).eval()
    ours = model.state_dict()
    weights = {
        name: fuse(model.config, each.ours, ours.__getitem__)
        for name, each in weight_map(model.config).items()
    }
    assert not theirs.load_state_dict(
        weights, strict=False
    ).unexpected_keys  # a tied head is missing
    return theirs


def measure(writers: dict[str, Write], options: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Returns the tokens per second of each writer.

    The time of one new token, which is the prefill, is subtracted from decoding. Where another job makes the
    difference negative, both are timed again.
    """
    draw = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in writers}
    short = [torch.randint(0, vocab, (rows, PROMPT), generator=draw) for rows in BATCHES]
    long = torch.randint(0, vocab, (1, options.prefill), generator=draw)

    def timed(write: Write, tokens: torch.Tensor, count: int) -> float:
        begin = time.perf_counter()
        write(tokens, count)
        return time.perf_counter() - begin

    def timed_decoding(write: Write, tokens: torch.Tensor) -> float:
        for _ in range(20):
            seconds = timed(write, tokens, 1 + options.tokens) - timed(write, tokens, 1)
            if seconds > 0:
                return seconds
        sys.exit(
            f"error: {options.tokens} tokens take less than this machine's noise; raise --tokens"
        )

    for number in range(options.rounds + 1):  # the first warms up
        for name, write in writers.items():
            rates = {"prefill": options.prefill / timed(write, long, 1)}
            for tokens in short:
                rates[f"decode_{len(tokens)}"] = (
                    len(tokens) * options.tokens / timed_decoding(write, tokens)
                )
            for case, rate in rates.items() if number else ():
                found[name].setdefault(case, []).append(rate)
    return {
        name: {case: round(statistics.median(rates), 2) for case, rates in cases.items()}
        for name, cases in found.items()
    }


def run(variant: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    config = replace(
        VARIANTS[variant], max_seq_len=max(options.prefill, PROMPT + options.tokens) + 2
    )
    model = Llama(config).eval()
    init_weights(model, seed=0)
    writers: dict[str, Write] = {}
    if find_spec("transformers") is not None:
        theirs = their_model(model).to(DTYPES[precision])
        writers |= {
            "transformers": their_writer(theirs, None),
            "static": their_writer(theirs, "static"),
        }
    for weight in model.parameters():
        weight.data = weight.data.to(DTYPES[precision])
    rates = measure({"ours": our_writer(model)} | writers, options, config.vocab_size)
    ratios = {
        case: {name: float(f"{rates['ours'][case] / rates[name][case]:.3g}") for name in writers}
        for case in rates["ours"]
    }
    return {"variant": variant, "precision": precision, "tokens_per_sec": rates, "ratio": ratios}


def main() -> None:
    settings = dict(variants="quickstart,194m", tokens=64, prefill=512, rounds=3)
    options = parser_of(__doc__, **settings).parse_args()
    if find_spec("transformers") is None:
        print("note: no package transformers: nothing is compared", file=sys.stderr)
    results = []
    for variant in options.variants.split(","):
        for precision in DTYPES:
            results.append(run(variant, precision, options))
            print(results[-1], flush=True)
    write_result(about_machine() | {"results": results}, options.output)


if __name__ == "__main__":
    main()
