"""`python -m fms_fsdp import`: a folder of Hugging Face → a run folder with its weights as a checkpoint of
step 0."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from fms_fsdp.atomic import write_json
from fms_fsdp.checkpoint.io import SaveFailed, collect_tensors, write_checkpoint
from fms_fsdp.config import (
    BatchPlan,
    DataConfig,
    ModelConfig,
    OptimConfig,
    Precision,
    TrainConfig,
    flag,
)
from fms_fsdp.config.flag import non_defaults
from fms_fsdp.distributed.axes import ParallelDims
from fms_fsdp.distributed.runtime import versions
from fms_fsdp.errors import UserError
from fms_fsdp.extras.hf import AS_THEY_ARE, find_family, hf_weights
from fms_fsdp.extras.hf_folder import HFFolder, fill, find_hf_tokenizer, open_folder
from fms_fsdp.extras.hf_tokenizer import TOKENIZER_FILES
from fms_fsdp.extras.weight_files import check_finite
from fms_fsdp.models.config import TransformerConfig
from fms_fsdp.models.flops import num_params
from fms_fsdp.models.llama import Llama
from fms_fsdp.models.variants import VARIANTS
from fms_fsdp.optim.schedules import RunLength, find_milestones
from fms_fsdp.run.trained_run import ORIGINALS
from fms_fsdp.state import RunConfig, TrainMetadata, working_folder
from fms_fsdp.tools.import_weights.from_fms_fsdp import find_checkpoint, open_checkpoint
from fms_fsdp.tools.prepare.writer import save_tokenizer
from fms_fsdp.tools.whole_folder import check_is_free, whole_folder


@dataclass(frozen=True)
class ImportConfig:
    """Which weights to import, and into which run folder."""

    path: str = flag(
        "",
        "a folder of Hugging Face, or a checkpoint of fms-fsdp: step_N_ckp or a .pth file",
        form="path",
    )
    output: str = flag("", "the run folder to make", form="path")
    ntk_alpha: int = flag(
        1, "the factor by which fms-fsdp stretched the rotary table; 1: none", min=1
    )
    model: ModelConfig = ModelConfig()

    def __post_init__(self) -> None:
        for name in ("path", "output"):
            if not getattr(self, name):
                raise UserError(f"--{name} is missing; name the folder")
        if self.model.init_from_hf or self.model.hf_config:
            raise UserError("--init_from_hf and --hf_config are for a training; use --path")


def main(config: ImportConfig) -> None:
    """Writes the run folder beside its place and moves it there when it is whole.

    Raises:
        UserError: the folder is not whole, of a class or with a field that our models do not have, or its
            weights are not those of its config.json.
        OSError: the run folder cannot be written.
    """
    folder, output = Path(config.path).expanduser(), Path(config.output).expanduser()
    check_is_free(output)
    model = _load(_open(config, folder))
    try:
        with whole_folder(output) as partial:
            digest = _write(model, folder, partial, output)
    except SaveFailed as error:
        raise UserError(
            f"--output ({output}) cannot be written: {error}; choose another place"
        ) from error
    print(f"{output}: {num_params(model.config):,} parameters, step 0")
    if not digest:
        print(
            "note: no tokenizer there can be read: generate needs one beside the data that you train on"
        )
    print(
        f"train on with: --ckpt_load_path={quote(str(output))}/checkpoints {_flags(model.config)}"
    )


def _open(config: ImportConfig, path: Path) -> HFFolder:
    """A checkpoint of fms-fsdp has no shape beside it: the flags say it; a folder has one."""
    if not path.exists():
        raise UserError(
            f"--path ({path}) must be a folder of Hugging Face or a checkpoint of fms-fsdp"
        )
    theirs, given = (
        find_checkpoint(path),
        non_defaults(config.model) | {"ntk_alpha": config.ntk_alpha},
    )
    if theirs is not None:
        return open_checkpoint(theirs, config.model, config.ntk_alpha)
    for name, value in given.items():
        if (name, value) != ("ntk_alpha", 1):
            raise UserError(
                f"--{name} ({value}) is for a checkpoint of fms-fsdp; config.json says the shape"
            )
    return open_folder(path, "--path")


def _load(found: HFFolder) -> Llama:
    with torch.device("meta"):
        model = Llama(found.shape)
    if find_family(found.shape).packing is not AS_THEY_ARE:
        fill(model.to_empty(device="cpu"), found)
        return model
    weights = dict[str, torch.Tensor]()  # those in fp32 stay where they are mapped
    for name, made in hf_weights(found.shape).items():
        weights[made.ours[0]] = found.weights[name]().float()
        check_finite(name, weights[made.ours[0]])
    model.load_state_dict(weights, assign=True)
    return model


def _write(model: Llama, folder: Path, partial: Path, output: Path) -> str:
    """Fills the run folder `partial`, which becomes `output`; returns the digest of its tokenizer, "" if it
    has none."""
    (partial / "tokenizer" / "meta").mkdir(parents=True)
    digest = ""
    _keep_originals(folder, partial / ORIGINALS)
    with suppress(UserError):
        if (tokenizer := find_hf_tokenizer(folder)) is not None:
            save_tokenizer(partial / "tokenizer", tokenizer)
            digest = tokenizer.vocabulary.digest
    size, path = model.config.max_seq_len, str(output.absolute() / "tokenizer") if digest else ""
    cfg = TrainConfig(data=DataConfig(data_path=path, seq_length=size))
    record = RunConfig(
        cfg,
        world_size=1,
        device_type="cpu",
        dims=ParallelDims("none"),
        batch=BatchPlan(1, 1, 1),
        model=model.config,
        precision=Precision(),
        num_steps=1,
        tokenizer=digest,
        milestones=find_milestones(OptimConfig(), RunLength(1, size, lambda step: step * size)),
        versions=versions(),
        working_dir=working_folder(),
        chosen={},
    )
    root = partial / "checkpoints"
    root.mkdir()
    state = TrainMetadata(
        0, weights_only=True, imported_from=str(folder.absolute()), **record.saved_with
    )
    write_checkpoint(collect_tensors(model, None), root, state)
    write_json(partial / "config.json", record.content)
    return digest


def _keep_originals(folder: Path, kept: Path) -> None:
    """Copies what a folder of Hugging Face says of its texts, as it is: an export without training has it."""
    for name in (*TOKENIZER_FILES, "config.json") if folder.is_dir() else ():
        if (folder / name).is_file():
            kept.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, kept / name)


def _flags(config: TransformerConfig) -> str:
    """The flags of a training that has this shape and this context."""
    shape, context = _shape(config), f"--max_seq_len={config.max_seq_len}"
    fitting = [name for name, variant in VARIANTS.items() if _shape(variant) == shape]
    if fitting:
        return f"--model_variant={fitting[0]} {context}"
    base = _shape(VARIANTS["7b"])
    if (scaling := config.rope_scaling) is not None:
        numbers = [scaling.factor]
        if scaling.kind == "llama3":
            numbers += [scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_len]
        shape["rope_scaling"] = ":".join([scaling.kind, *(_exactly(number) for number in numbers)])
    flags = [f"--{name}={value}" for name, value in shape.items() if value != base[name]]
    return " ".join([*flags, context])


def _exactly(number: float) -> str:
    """A number in the fewest digits that give it back."""
    return str(int(number)) if number == int(number) else repr(number)


def _shape(config: TransformerConfig) -> dict[str, Any]:
    free = ("max_seq_len", "init_std", "attn_impl", "dropout", "attn_dropout", "vocab_multiple_of")
    return {name: value for name, value in asdict(config).items() if name not in free}
