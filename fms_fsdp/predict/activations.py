"""What the forward pass of a micro-step keeps for its backward pass, in bytes: arithmetic alone.

Autograd keeps what the derivative of each operation reads. Per token, D model, Q all query heads, K all key
heads, F ffn, H heads:

    norms       the input D and, for the products, the result D       (twice a block; once more for q and k)
    attention   q, k, v and its result, 2 Q + 2 K, and the log of each sum of exp, H fp32
    swiglu      gate, up and the product, 3 F; without the compiler silu(gate) too

Without the compiler an RMSNorm on a CPU is made of single operations: it also keeps its input over its size,
and both in fp32. A fused norm, of a GPU or of the compiler, keeps its input alone.
Masks are left out: those added to scores (ALiBi, windows on a CPU; memory.py adds learned ones), and those
of flex_attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from fms_fsdp.config import NUM_BYTES, ParallelConfig, Precision
from fms_fsdp.models.chunks import chunk_rows, span_rows
from fms_fsdp.models.variants import LlamaConfig

_SHORT_ROW = 256  # of bf16 on a CPU: attention by explicit products (models/attention.py)


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per token that a block keeps, by what is recomputed. `number`: bytes of an activation."""

    config: LlamaConfig
    seq_length: int
    number: int
    compiled: bool
    device_type: str

    @property
    def queries(self) -> int:
        return self.config.num_attention_heads * self.config.head_dim

    @property
    def keys(self) -> int:
        return self.config.num_kv_heads * self.config.head_dim

    @property
    def branches(self) -> int:
        """Numbers that the first products of the feed-forward give."""
        return (2 if self.config.activation == "swiglu" else 1) * self.config.ffn_hidden_size

    @property
    def is_explicit(self) -> bool:
        """Whether attention is products and a softmax, whose weights exist as a whole."""
        is_short = self.device_type == "cpu" and self.number == 2 and self.seq_length <= _SHORT_ROW
        is_short |= self.device_type == "cpu" and self.config.pos_emb == "relative"
        return self.config.attn_dropout > 0 or (is_short and self.config.attn_impl == "auto")

    def norm(self, size: int, count: int = 1, *, fused: bool = False) -> int:
        """What a norm of `count` parts keeps beside its result, its input included."""
        of_layer = self.config.norm == "layernorm"
        sums = 4 * count
        if of_layer:  # the mean too; a CPU keeps both in the dtype of the input
            sums = 2 * count * (self.number if self.device_type == "cpu" else 4)
        if fused or of_layer or self.device_type != "cpu":
            return self.number * size + sums
        return 8 * size + sums  # the input, in fp32, and the input over its size

    def whole(self) -> int:
        """Where nothing is recomputed."""
        c, number = self.config, self.number
        hidden, of_norm = c.hidden_size, self.norm(c.hidden_size, fused=self.compiled)
        norms = 2 * of_norm
        shares_input = of_norm < 8 * hidden or number == 4
        if c.parallel_residual and shares_input:  # both norms read one input
            norms -= number * hidden
        kept = norms + 2 * number * hidden + self._attention()
        if c.qk_norm:
            heads = 2 if c.qk_norm_wide else c.num_attention_heads + c.num_kv_heads
            kept += self.norm(self.queries + self.keys, heads, fused=self.compiled)
        kept += number * (self.branches + c.ffn_hidden_size)
        if c.activation == "swiglu" and not self.compiled:
            kept += number * c.ffn_hidden_size
        return kept + 2 * hidden * (c.dropout > 0) + c.ffn_hidden_size * (c.ffn_dropout > 0)

    def _attention(self) -> int:
        """q, k, v, the result, and what lies between."""
        c, drops = self.config, self.config.attn_dropout > 0
        if not self.is_explicit:
            return 2 * self.number * (self.queries + self.keys) + 4 * c.num_attention_heads
        if self.compiled:
            weights = c.num_attention_heads * (self.seq_length * (2 * self.number + drops) + 8)
        else:  # the softmax in fp32, and the weights that the last product reads, a copy of it
            copies = self.number if self.number < 4 or drops else 0
            weights = c.num_attention_heads * self.seq_length * (4 + copies + drops)
        return 4 * self.number * self.queries + weights  # keys and values copied for each query head

    def cheap(self) -> int:
        """Where the compiler computes again all but products and attention. The compiler takes attention on a
        CPU for cheap."""
        c = self.config
        sums = self.number * c.hidden_size * (1 if c.parallel_residual else 2)
        kept = sums + self.number * (self.queries + 2 * self.keys + self.branches)
        if self.is_explicit:
            weights = c.num_attention_heads * (self.seq_length * self.number + 8)
            return kept + self.number * self.queries + weights
        if self.device_type == "cpu":
            return kept
        return kept + self.number * self.queries + 4 * c.num_attention_heads

    def operations(self, ops: tuple[str, ...]) -> int:
        """Where a block keeps its input and the results of some operations. The last product's result, which
        nothing needs, is kept by blocks that are not compiled."""
        c = self.config
        hidden, is_llama, products = c.hidden_size, c.activation == "swiglu", 0
        if "products" in ops:
            products = self.queries + 2 * self.keys + hidden + self.branches
            products += 0 if self.compiled else hidden
        elif "attention_products" in ops:
            products = self.keys + hidden
        elif "every_second_product" in ops:  # of q, k, v, o, gate, up, down, as activation.py counts
            products = self.keys + hidden + (c.ffn_hidden_size if is_llama else 0)
            products += 0 if self.compiled or is_llama else hidden
        kept = self.number * (hidden + products)
        if "attention" in ops and not self.is_explicit:
            kept += self.number * self.queries + 4 * c.num_attention_heads
        return kept

    def again(self, section: ParallelConfig) -> int:
        """What a block, or a segment, that recomputes holds in its backward pass beside what it has kept."""
        if section.recomputes == "cheap" and self.compiled:
            return max(0, self.whole() - self.cheap())
        if section.recomputes == "ops":
            return max(0, self.whole() - self.operations(section.kept_ops(self.seq_length)))
        whole = min(section.segment, self.config.num_layers) * self.whole()
        return max(0, whole - self.number * self.config.hidden_size) * (section.recomputes == "blocks")

    @property
    def temporaries(self) -> int:
        """The gradients of the widest place of the backward pass: of the output and the first products."""
        return self.number * (self.config.hidden_size + self.branches)


def activation_bytes(
    config: LlamaConfig,
    num_tokens: int,
    seq_length: int,
    precision: Precision,
    section: ParallelConfig,
    *,
    compiled: bool = True,
    device_type: str = "cuda",
) -> int:
    """What the blocks keep of a micro-step of so many tokens, as `--recompute` says."""
    block = BlockActivations(config, seq_length, NUM_BYTES[precision.compute], compiled, device_type)
    kept = config.num_layers * block.whole()
    if section.recomputes == "cheap" and compiled:
        kept = config.num_layers * block.cheap()
    elif section.recomputes == "ops":
        kept = config.num_layers * block.operations(section.kept_ops(seq_length))
    elif section.recomputes == "blocks":
        segments = -(-config.num_layers // section.segment)
        chosen = max(1, int(segments * section.recomputed_share))
        rest = max(0, config.num_layers - chosen * section.segment)
        kept = chosen * block.number * config.hidden_size + rest * block.whole()
    return num_tokens * kept


def loss_bytes(
    config: LlamaConfig,
    num_tokens: int,
    vocab_size: int,
    precision: Precision,
    weight_bytes: int,
    *,
    compiled: bool,
    device_type: str,
) -> int:
    """The most that the final norm, the head and the loss hold at once, for these tokens of a micro-step.

    The forward pass of the loss makes the gradients of both its inputs (models/loss.py), beside the logits of
    a span. The backward pass scales copies of both. `weight_bytes`: of a number of the head's weight.
    """
    number, hidden = NUM_BYTES[precision.compute], config.hidden_size
    stream, weight = number * num_tokens * hidden, vocab_size * hidden
    rows = chunk_rows(num_tokens, vocab_size, device_type)
    span = min(num_tokens, span_rows(rows, vocab_size, device_type))
    copies = 0 if compiled else 2 if device_type == "cpu" and number < 4 else 1
    softmax = copies * 4 * rows * vocab_size
    logits = number * span * (vocab_size + hidden)
    if span >= num_tokens:  # the product of the only span, and a copy in another dtype
        gradient = number * weight + (weight_bytes * weight if number != weight_bytes else 0)
        forward = max(softmax, gradient)
    else:  # the sum over spans in fp32
        forward = 4 * weight + max(softmax, weight_bytes * weight if weight_bytes != 4 else 0)
    norm = BlockActivations(config, 1, number, False, device_type).norm(hidden)
    return num_tokens * norm + max(2 * stream + logits + forward, 2 * (stream + weight_bytes * weight))
