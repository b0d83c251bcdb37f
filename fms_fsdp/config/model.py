"""Flags of the model: a variant, and flags that replace its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fms_fsdp.config.flag import WithoutEffect, fixed_flag, flag, logged_flag, only_one


@dataclass(frozen=True)
class ModelConfig:
    """The model: a variant, and flags that replace its values.

    On resume, the flags together must give the model of the checkpoint.

    When to change: `--list_variants` shows sizes and memory. For a size between two variants,
    change `num_layers` and `hidden_size` together. Fewer `num_kv_heads` make a model smaller and
    generation faster. docs/reference/models.md explains the advanced flags.
    """

    model_variant: str = fixed_flag("7b", form="folder name")
    """Name of the model variant; --list_variants lists all."""
    hf_config: str = fixed_flag("", form="path")
    """Hugging Face config.json that gives the shape instead of a variant; weights are random."""
    init_from_hf: str = flag("", form="path", in_name=True)
    """Hugging Face checkpoint that gives the shape and the initial weights; ignored once the run
    has a checkpoint of its own."""
    init_new_tokens: str = flag("refuse", choices="refuse mean", in_name=True, needs="init_from_hf")
    """Initial embedding of tokens that init_from_hf lacks: mean is the mean embedding, refuse
    raises an error."""
    num_layers: int | None = fixed_flag(None, min=1, max=10**5)
    """Number of transformer blocks (default: the variant's)."""
    hidden_size: int | None = fixed_flag(None, min=1)
    """Width of the hidden states (default: the variant's)."""
    ffn_hidden_size: int | None = fixed_flag(None, min=1)
    """Inner width of the feed-forward layer (default: the variant's ratio to hidden_size)."""
    num_attention_heads: int | None = fixed_flag(None, min=1)
    """Number of query heads; divides hidden_size (default: the variant's)."""
    num_kv_heads: int | None = fixed_flag(None, min=1)
    """Number of key/value heads; divides the query heads (default: the variant's)."""
    head_dim: int | None = fixed_flag(None, min=1, max=65536, advanced=True)
    """Width of an attention head (default: hidden_size / num_attention_heads)."""
    rope_theta: float | None = fixed_flag(None, min=1)
    """Base of the RoPE frequencies (default: the variant's) (no effect without --pos_emb=rope)."""
    rope_scaling: str | None = fixed_flag(None, advanced=True)
    """RoPE scaling: linear:FACTOR (1 is none) or llama3:FACTOR[:1:4:8192] (no effect without
    --pos_emb=rope)."""
    rope_pct: float | None = fixed_flag(None, above=0, max=1, advanced=True)
    """Fraction of each head that RoPE rotates (default: the variant's) (no effect without
    --pos_emb=rope)."""
    norm_eps: float | None = fixed_flag(None, min=0)
    """Epsilon of the normalization layers (default: the variant's)."""
    vocab_size: int | None = fixed_flag(None, min=2)
    """Number of tokens (default: the data's, or else the variant's)."""
    vocab_multiple_of: int | None = fixed_flag(None, min=1, max=2**22, advanced=True)
    """Pad the rows of embedding and head to a multiple of this number (default: the variant's)."""
    max_seq_len: int | None = logged_flag(None, min=1)
    """Maximum number of positions of the model and of generated text (default: seq_length, or a
    config.json's if larger)."""
    tie_embeddings: bool | None = fixed_flag(None)
    """Share the weights of the embedding with the output head (default: the variant's)."""
    init_std: float | None = flag(None, above=0, max=10, in_name=True)
    """Standard deviation of the initial weights (default: the variant's); no effect with
    init_from_hf."""
    residual_scaled_init: bool | None = flag(None, in_name=True, advanced=True)
    """Divide the initial weights of output projections by sqrt(2 num_layers) (default: true); no
    effect with init_from_hf."""
    norm: str | None = fixed_flag(None, choices="rmsnorm layernorm scalenorm", advanced=True)
    """Type of the normalization layers (default: the variant's)."""
    qk_norm: bool | None = fixed_flag(None, advanced=True)
    """Normalize the queries and keys of each head (default: the variant's)."""
    pos_emb: str | None = fixed_flag(
        None, choices="rope learned sinusoidal alibi relative none", advanced=True
    )
    """Type of the positional encoding (default: the variant's)."""
    relative_buckets: int | None = fixed_flag(None, min=2, max=65536, advanced=True)
    """Number of buckets of relative positions (default: the variant's)."""
    relative_max_distance: int | None = fixed_flag(None, min=2, max=2**30, advanced=True)
    """Distance from which all relative positions share a bucket (default: the variant's)."""
    activation: str | None = fixed_flag(None, choices="swiglu gelu gelu_tanh relu2", advanced=True)
    """Activation of the feed-forward layer; swiglu has three matrices (default: the variant's)."""
    bias: bool | None = fixed_flag(None, advanced=True)
    """Add a bias to all linear layers except the head (default: the variant's)."""
    qkv_bias: bool | None = fixed_flag(None, advanced=True)
    """Add a bias to queries, keys and values, as in Qwen2 (default: the variant's)."""
    parallel_residual: bool | None = fixed_flag(None, advanced=True)
    """Compute attention and feed-forward from the same input (default: the variant's)."""
    attn_window: int | None = fixed_flag(None, min=0, advanced=True)
    """Sliding-window attention: tokens that a token attends to, including itself; 0 is the full
    sequence (default: the variant's)."""
    attn_window_pattern: str | None = fixed_flag(None, advanced=True)
    """Layers with local (L) and global (G) attention, repeated: LLG (default: L) (no effect without
    --attn_window, which a config.json may set)."""
    z_loss: float | None = fixed_flag(None, min=0, max=1, advanced=True)
    """Factor of log(Z)^2, which is added to the training loss of each label, e.g. 1e-4 (default:
    0)."""
    dropout: float | None = logged_flag(None, min=0, below=1)
    """Dropout probability of the embedding output and each residual branch (default: 0)."""
    attn_dropout: float | None = logged_flag(None, min=0, below=1, advanced=True)
    """Dropout probability of the attention weights, which CPUs then keep in memory (default: 0)."""
    ffn_dropout: float | None = logged_flag(None, min=0, below=1, advanced=True)
    """Dropout probability inside the feed-forward layer (default: 0)."""
    attn_impl: str = flag("auto", choices="auto flash cudnn efficient math", advanced=True)
    """Backend of scaled_dot_product_attention; auto lets torch choose."""
    model_builder: str = fixed_flag("", advanced=True)
    """module:function that builds your own model from the shape (see docs/reference/models.md)."""

    def without_effect(self) -> Iterator[WithoutEffect]:
        """Yields the flags that these settings make useless."""
        if self.pos_emb not in ("rope", None):
            names = ("rope_theta", "rope_scaling", "rope_pct")
            yield WithoutEffect(names, "without --pos_emb=rope", "set --pos_emb=rope", ("pos_emb",))
        # The config.json of a Mistral has a window of its own.
        if not (self.attn_window or self.hf_config or self.init_from_hf):
            pattern = ("attn_window_pattern",)
            window = ("attn_window",)
            yield WithoutEffect(pattern, "without --attn_window", "set --attn_window", window)

    def __post_init__(self) -> None:
        only_one(self, "init_from_hf", "hf_config", "model_variant")

    @property
    def name(self) -> str:
        """The variant, or the name of the folder that the shape comes from."""
        path = Path(self.init_from_hf or self.hf_config)
        if path.suffix == ".json":
            path = path.parent
        return path.name or self.model_variant

    @property
    def name_and_sizes(self) -> str:
        """The name, with the sizes that flags set."""
        sizes = []
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"):
            size = getattr(self, name)
            if size is not None:
                sizes.append(f"{name} {size:,}")
        if not sizes:
            return self.name
        return f"{self.name} with {', '.join(sizes)}"
