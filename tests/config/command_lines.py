"""Command lines whose verdicts, values and default run names test_recorded.py compares with a record.

`python -m tests.config.command_lines` records the present answers. Record again only when another
answer is meant, and give the reason in the commit message: a run whose default name changes starts
again at step 0.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "command_lines.json.xz"

# each flag gets each of these texts, and some of its choices and aliases
TEXTS = (
    "",
    *"none true 0 1 2 -1 0.5 1.5k 4Ki 1e6 1e999999999 abc a,b 1,2,3 nan x/../y .. a:b".split(),
    *"every:4 1/2 10:20 1-100:10,200- loss@100 0.05 100samples wiki:2".split(),
    "9" * 70,
    "a\tb",
    "k=v",
)

# flags that contradict one another, spellings, mistakes
TOGETHER = """
--hf_config=a --init_from_hf=b|--model_variant=tiny --hf_config=a
--model_variant=tiny --init_from_hf=a|--datasets=a,a --data_path=x
--datasets=a,b --weights=1 --data_path=x|--datasets=a,b --weights=1,-1 --data_path=x
--logical_shards=1000 --data_path=x|--dataset_builder=x|--dataset_builder=m:f --data_kwargs=a
--recompute=ops --fsdp_activation_checkpointing=True
--recompute=blocks --recompute_segment=2 --fsdp_blocks_per_group=3
--recompute=blocks --recompute_segment=2 --model_builder=m:f
--sharding_strategy=zero1 --reshard_after_forward=True
--sharding_strategy=zero2 --sync_each_micro_step=False|--sharding_strategy=none --tp_size=2
--sequence_parallel=True|--async_tp=True|--num_steps=1 --num_tokens=1
--num_tokens=1 --num_samples=1|--num_epochs=1 --num_samples=1 --data_path=x
--batch_size=auto --grad_accum_steps=1 --global_batch_size=4
--precision=fp32 --mixed_precision=True|--precision=bf16_pure --param_dtype=fp32
--precision=bf16_pure --optimizer_state_dtype=fp32|--precision=fp32 --param_dtype=bf16
--grad_accum_dtype=bf16|--warmup=3 --warmup_steps=3|--min_lr=1|--min_lr=1e-5 --min_lr_ratio=0.2
--lr_schedule=step|--keep_every=3|--keep_best=3 --eval_interval=1|--keep_steps=3|--keep_ranges=1-3
--resume_step=3 --resume=never|--warmup_steps=3 --num_steps=2|--num_epochs=1 --dataset_builder=m:f
--rampup_batch_size=1,1,1 --dataset_builder=m:f|--num_epochs=1 --use_dummy_dataset
--keep_best=2 --keep_last_n=1|--eval_epochs=1 --dataset_builder=m:f
--eval_epochs=1 --use_dummy_dataset|--init_from_hf=a --ckpt_load_path=b
--export_interval=3 --checkpoint_interval=2|--export_interval=3 --checkpoint_schedule=3@9
--trackers=none,wandb|--load_model_only=True|--batch_size 4 --num_steps 3|stray|--seq_length=3 stray
--seq_length=3 --seq_length=4|--seq_length=3 --seq_length=3|--config=bench --seq_length=64
--config=nope|--config_dir=x|--no_such=1|--lr=3|--max_steps=4|--zero_optimization=1|-|--|--=3
--dry_run|--dry_run=maybe|-seq_length=3
--selective_checkpointing=1/2 --recompute=ops|--recompute_ops=attention|--cp_method=gather
--pp_schedule=zbv|--pp_virtual_stages=2|--pp_micro_batch_size=2
--hsdp_shard_size=2 --sharding_strategy=fsdp|--datasets=a --use_dummy_dataset
--weights=1 --datasets=a --use_dummy_dataset|--skip_steps=1:2 --use_dummy_dataset
--packing=bestfit --use_dummy_dataset|--eval_steps=3|--test_steps=3|--sample_prompts=a
--eval_data_path=a|--eval_datasets=a|--resuming_dataset=False|--keep_best_metric=loss|--lr_power=2
--lr_gamma=0.5|--lr_step_size=3|--rampup_round=2|--rampup_micro_batch|--init_new_tokens=mean
--teacher_weight=0.1|--rope_theta=3 --pos_emb=alibi|--attn_window_pattern=LG
--tensorboard_dir=a --trackers=none|--tracker_entity=a|--loss_scale=3|--float8_scaling=tensor
--fsdp_prefetch=1 --sharding_strategy=ddp|--adam_beta1=0.5 --optimizer=sgd
--min_lr=1e-9 --lr_schedule=constant|--checkpoint_interval=5 --checkpoint_schedule=3@9
--loss_scale_window=3 --precision=fp16 --loss_scale=4|--stochastic_rounding=False
--reduce_dtype=bf16 --sharding_strategy=none|--data_kwargs=a=b
--load_model_only --ckpt_load_path=a --resuming_dataset=False|--init_std=0.1 --init_from_hf=a
--pp_virtual_stages=3 --pp_size=2|--weight_decay=0.2 --optimizer=rprop|--config=profile,continue
--recompute=ops --fsdp_activation_checkpointing=False
--recompute=none --fsdp_activation_checkpointing=False|--mixed_precision=True --precision=bf16
--num_steps=3 --num_tokens=5|--num_epochs=-1 --num_steps=3|--tensorboard_dir=a --trackers=wandb
"""


def command_lines(own_texts: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Returns the command lines; `own_texts`: flag -> choices and aliases to try."""
    lines = []
    for name, texts in own_texts.items():
        lines += [[f"--{name}={text}"] for text in (*TEXTS, *texts)]
        lines += [[f"--{name}"], [f"--no{name}"], [f"--{name.replace('_', '-')}", "3"]]
    return lines + [line.split() for line in TOGETHER.strip().replace("\n", "|").split("|")]


def answer(argv: Sequence[str]) -> tuple[dict[str, Any], str] | str:
    """Returns all values by flat name and the default run name, or the text of the error."""
    from fms_fsdp.config import TrainConfig
    from fms_fsdp.config.flag import flag_values
    from fms_fsdp.config.parse import parse_flags
    from fms_fsdp.errors import UserError

    try:
        config = parse_flags(TrainConfig, argv)
    except UserError as error:
        return str(error)
    return json.loads(json.dumps(flag_values(config))), config.run_name


def record() -> None:
    from fms_fsdp.config import TrainConfig
    from fms_fsdp.config.flag import flag_table

    table = flag_table(TrainConfig)
    defaults = json.loads(json.dumps({name: row.default for name, row in table.items()}))
    own = {
        name: [
            *row.choices[:3],
            *(choice.upper() for choice in row.choices[:1]),
            *list(row.aliases)[:2],
        ]
        for name, row in table.items()
    }
    answers: list[Any] = []  # None for an error, else the changed values and the run name
    for line in command_lines(own):
        found = answer(line)
        if isinstance(found, str):
            answers.append(None)
        else:
            values, run_name = found
            changed = {name: value for name, value in values.items() if value != defaults[name]}
            answers.append([changed, run_name])
    content = {"defaults": defaults, "own_texts": own, "answers": answers}
    RECORD.write_bytes(lzma.compress(json.dumps(content).encode(), preset=9))


if __name__ == "__main__":
    record()
