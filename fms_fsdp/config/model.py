"""The flags of the model: a variant, and what replaces values of the variant. One row a flag: see flag.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fms_fsdp.config.flag import announced_flag, free_flag, refused_flag


def _of_variant(help: str, **rules: Any) -> Any:
    """A flag whose default is the value of the variant; a resume with another value is refused."""
    return refused_flag(None, f"{help} (default: the variant's)", **rules)


# fmt: off
@dataclass(frozen=True)
class ModelConfig:
    """The model: the name of a variant, and fields that replace values of the variant.

    On resume, the flags together must give the model of the checkpoint.

    When to change: `--list_variants` shows sizes and memory. For a size between two variants change
    `num_layers` and `hidden_size` together. Fewer `num_kv_heads` make a model smaller and its generation
    faster. Leave `norm_eps`, `init_std` and the advanced flags unless you repeat somebody's recipe;
    docs/models.md says who uses which.
    """

    model_variant: str = refused_flag("7b", "name of a variant; a wrong name lists all", form="folder name")
    hf_config: str = refused_flag("", form="path", part="from_hf",
        help="config.json of Hugging Face that gives the shape in place of a variant; weights are new")
    init_from_hf: str = free_flag("", form="path", in_name=True, part="hf_folder",
        help="folder of Hugging Face: the run has the shape of this model and begins with the weights, "
        "which are read in place, unless the run has a checkpoint")
    init_new_tokens: str = free_flag("refuse", choices=("refuse", "mean"), in_name=True, part="hf_folder",
        help="first weights of tokens that init_from_hf lacks: mean is the mean row, refuse allows none")
    num_layers: int | None = _of_variant("number of transformer blocks", minimum=1)
    hidden_size: int | None = _of_variant("width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = refused_flag(None, minimum=1,
        help="inner width of the feed-forward block (default: the variant's share of hidden_size)")
    num_attention_heads: int | None = _of_variant("number of query heads, divides hidden_size", minimum=1)
    num_kv_heads: int | None = _of_variant("number of key/value heads, divides the query heads", minimum=1)
    head_dim: int | None = refused_flag(None, minimum=1, maximum=65536, advanced=True,
        help="width of a head (default: hidden_size / num_attention_heads)")
    rope_theta: float | None = _of_variant("base of the rotary frequencies", minimum=1)
    rope_scaling: str | None = refused_flag(None, advanced=True, part="rope_scaling",
        help="stretch of the rotary frequencies: linear:FACTOR (1 is none) or llama3:FACTOR[:1:4:8192]")
    rope_pct: float | None = _of_variant("share of a head that is rotated", above=0, maximum=1, advanced=True)
    norm_eps: float | None = _of_variant("epsilon inside the norms", minimum=0)
    vocab_size: int | None = refused_flag(None, minimum=2,
        help="number of tokens (default: the data's; the variant's if the data name none)")
    vocab_multiple_of: int | None = _of_variant("fill up embedding and head to a multiple of so many rows",
        minimum=1, maximum=65536, advanced=True)
    max_seq_len: int | None = announced_flag(None, minimum=1,
        help="positions of the model and of generated text (default: seq_length, or a larger config.json's)")
    tie_embeddings: bool | None = _of_variant("the output head uses the weights of the embedding")
    init_std: float | None = free_flag(None, above=0, maximum=10, in_name=True,
        help="standard deviation of the initial weights (default: the variant's)")
    residual_scaled_init: bool | None = free_flag(None, in_name=True, advanced=True,
        help="projections that end a branch begin smaller by sqrt(2 num_layers) (default: true)")
    norm: str | None = _of_variant("type of the normalization layers",
        choices=("rmsnorm", "layernorm", "scalenorm"), advanced=True)
    qk_norm: bool | None = _of_variant("queries and keys are normalized, each head by itself", advanced=True)
    qk_norm_wide: bool | None = _of_variant("qk_norm norms all heads together, as OLMo2", advanced=True,
        part="relatives")
    norm_place: str | None = _of_variant("norms before or, as in OLMo2, after attention and feed-forward",
        choices=("before", "after"), advanced=True, part="relatives")
    pos_emb: str | None = _of_variant("type of the positional encoding",
        choices=("rope", "learned", "sinusoidal", "alibi", "relative", "none"), advanced=True)
    relative_buckets: int | None = _of_variant("number of distances that relative positions tell apart",
        minimum=2, maximum=65536, advanced=True, part="distance_bias")
    relative_max_distance: int | None = _of_variant("distance from which on relative positions are alike",
        minimum=2, maximum=2**30, advanced=True, part="distance_bias")
    activation: str | None = _of_variant("activation of the feed-forward block: swiglu has three matrices",
        choices=("swiglu", "gelu", "gelu_tanh", "relu2"), advanced=True)
    bias: bool | None = _of_variant("linear layers other than the head have a bias", advanced=True)
    qkv_bias: bool | None = _of_variant("queries, keys and values have a bias, as in Qwen2", advanced=True)
    rope_pattern: str | None = refused_flag(None, advanced=True,
        help="which layers rotate queries and keys (R), which have no positions (N), as RRRN, repeated "
        "(default: R)")
    embedding_multiplier: float | None = _of_variant("factor of the embeddings, as in Granite",
        above=0, maximum=1e6, advanced=True, part="relatives")
    attention_multiplier: float | None = _of_variant("factor of q k^T; 0 is 1 / sqrt(head_dim)",
        minimum=0, maximum=1e6, advanced=True)
    residual_multiplier: float | None = _of_variant("factor of each branch before it is added, as in Granite",
        above=0, maximum=1e6, advanced=True, part="relatives")
    logits_scaling: float | None = _of_variant("what the logits are divided by, as in Granite",
        above=0, maximum=1e6, advanced=True)
    parallel_residual: bool | None = _of_variant("attention and feed-forward share an input", advanced=True)
    attn_window: int | None = _of_variant("tokens that a token sees, with itself; 0 is the whole row",
        minimum=0, advanced=True)
    attn_window_pattern: str | None = refused_flag(None, advanced=True,
        help="which layers see the window (L), which the whole row (G), as LLG, repeated (default: L)")
    logit_softcap: float | None = _of_variant("c: logits are c tanh(logits / c); 0 is off",
        minimum=0, maximum=1e6, advanced=True)
    z_loss: float | None = refused_flag(None, minimum=0, maximum=1, advanced=True,
        help="factor of log(Z)^2, which training adds to the loss of a label, such as 1e-4 (default: 0)")
    dropout: float | None = announced_flag(None, minimum=0, below=1, part="dropout",
        help="share of the embedding's and each branch's outputs that a step leaves out (default: 0)")
    attn_dropout: float | None = announced_flag(None, minimum=0, below=1, part="dropout", advanced=True,
        help="share of the attention weights, all kept in memory, that a step leaves out (default: 0)")
    ffn_dropout: float | None = announced_flag(None, minimum=0, below=1, part="dropout", advanced=True,
        help="share of the feed-forward block's inner values that a step leaves out (default: 0)")
    attn_impl: str = free_flag("auto", choices=("auto", "flash", "cudnn", "efficient", "math"), advanced=True,
        help="backend of scaled_dot_product_attention; auto lets torch choose")
    model_builder: str = refused_flag("", advanced=True,
        help="module:function that builds your own model from the shape (see docs/models.md)")
    # fmt: on

    @property
    def name(self) -> str:
        """The name of the model: the variant, or the folder that the shape comes from."""
        path = Path(self.init_from_hf or self.hf_config)
        return (path.parent.name if path.suffix == ".json" else path.name) or self.model_variant

    @property
    def name_and_sizes(self) -> str:
        """The name, with the sizes that flags give in place of the sizes of the named model."""
        sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size")
        given = [f"{size} {value:,}" for size in sizes if (value := getattr(self, size)) is not None]
        return " with ".join(filter(None, (self.name, ", ".join(given))))
