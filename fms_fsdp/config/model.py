"""The flags of the model: a variant, and what replaces values of the variant. One row a flag: see flag.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.config.flag import announced_flag, free_flag, refused_flag

ACTIVATIONS = ("swiglu", "gelu", "gelu_tanh", "relu2")


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

    model_variant: str = refused_flag("7b", form="folder name",
        help="name of the variant; an unknown name prints all names")
    hf_config: str = refused_flag("", form="path", part="from_hf",
        help="config.json of Hugging Face that gives the shape in place of a variant; weights are new")
    init_from_hf: str = free_flag("", form="path", in_name=True, part="hf_folder",
        help="folder of Hugging Face: the run has the shape of this model and begins with the weights, "
        "which are read in place, unless the run has a checkpoint")
    init_new_tokens: str = free_flag("refuse", choices=("refuse", "mean"), in_name=True, part="hf_folder",
        help="first weights of tokens that init_from_hf lacks: mean is the mean row, refuse allows none")
    num_layers: int | None = refused_flag(None, minimum=1,
        help="number of transformer blocks (default: the variant's)")
    hidden_size: int | None = refused_flag(None, minimum=1,
        help="width of the residual stream (default: the variant's)")
    ffn_hidden_size: int | None = refused_flag(None, minimum=1,
        help="inner width of the feed-forward block (default: the variant's share of hidden_size)")
    num_attention_heads: int | None = refused_flag(None, minimum=1,
        help="number of query heads, a divisor of hidden_size (default: the variant's)")
    num_kv_heads: int | None = refused_flag(None, minimum=1,
        help="number of key/value heads, a divisor of num_attention_heads (default: the variant's)")
    head_dim: int | None = refused_flag(None, minimum=1, maximum=65536, advanced=True,
        help="width of a head (default: hidden_size / num_attention_heads)")
    rope_theta: float | None = refused_flag(None, minimum=1,
        help="base of the rotary frequencies (default: the variant's)")
    rope_scaling: str | None = refused_flag(None, advanced=True, part="rope_scaling",
        help="stretch of the rotary frequencies: linear:FACTOR (1 is none) or llama3:FACTOR[:1:4:8192]")
    rope_pct: float | None = refused_flag(None, above=0, maximum=1, advanced=True,
        help="share of the dims of a head that is rotated (default: the variant's)")
    norm_eps: float | None = refused_flag(None, minimum=0,
        help="epsilon inside the norms (default: the variant's)")
    vocab_size: int | None = refused_flag(None, minimum=2,
        help="number of tokens (default: the data's; the variant's if the data name none)")
    vocab_multiple_of: int | None = refused_flag(None, minimum=1, maximum=65536, advanced=True,
        help="fill up embedding and head to a multiple of so many rows (default: the variant's)")
    max_seq_len: int | None = announced_flag(None, minimum=1,
        help="number of positions of the model, also for generated text (default: seq_length, or more if a "
        "config.json says more)")
    tie_embeddings: bool | None = refused_flag(None,
        help="the output head uses the weights of the embedding (default: the variant's)")
    init_std: float | None = free_flag(None, above=0, maximum=10, in_name=True,
        help="standard deviation of the initial weights (default: the variant's)")
    residual_scaled_init: bool | None = free_flag(None, in_name=True, advanced=True,
        help="projections that end a branch begin smaller by sqrt(2 num_layers) (default: true)")
    norm: str | None = refused_flag(None, choices=("rmsnorm", "layernorm", "scalenorm"), advanced=True,
        help="type of the normalization layers (default: the variant's)")
    qk_norm: bool | None = refused_flag(None, advanced=True,
        help="queries and keys are normalized, each head by itself (default: the variant's)")
    pos_emb: str | None = refused_flag(None, choices=("rope", "learned", "sinusoidal", "alibi", "none"),
        advanced=True, help="type of the positional encoding (default: the variant's)")
    activation: str | None = refused_flag(None, advanced=True, choices=ACTIVATIONS,
        help="activation of the feed-forward block: swiglu has three matrices (default: the variant's)")
    bias: bool | None = refused_flag(None, advanced=True,
        help="linear layers other than the head have a bias (default: the variant's)")
    parallel_residual: bool | None = refused_flag(None, advanced=True,
        help="attention and feed-forward read the same input (default: the variant's)")
    attn_window: int | None = refused_flag(None, minimum=0, advanced=True,
        help="number of tokens that a token sees, with itself; 0 is the whole row (default: the variant's)")
    attn_window_pattern: str | None = refused_flag(None, advanced=True,
        help="which layers see the window (L), which the whole row (G), as LLG, repeated (default: L)")
    logit_softcap: float | None = refused_flag(None, minimum=0, maximum=1e6, advanced=True,
        help="c: logits are c tanh(logits / c); 0 is off (default: the variant's)")
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
