"""Flags of validation and of generated texts. A resume may change them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fms_fsdp.config.flag import WithoutEffect, flag, without_all


@dataclass(frozen=True)
class EvalConfig:
    """Validation on held-out data, which does not change the training.

    When to change: set `eval_interval` in every run whose result matters. More `eval_steps` make
    the loss less noisy and take longer.
    """

    eval_interval: int = flag(0, min=0)
    """Steps between validations on held-out data; the last step is validated too; 0 is off."""
    eval_epochs: float = flag(0.0, min=0, max=1e6, advanced=True)
    """Epochs between validations, where an epoch is as many tokens as all sources have; 0 is
    off."""
    eval_steps: int = flag(
        10,
        min=1,
        max=10**6,
    )
    """Global batches of each held-out source per validation: always the same ones, at most one
    epoch (no effect without an evaluation)."""
    eval_at_start: bool = flag(False)
    """Also validate before the first step of each launch."""
    eval_data_path: str = flag("", form="path")
    """Folder of held-out token shards (default: validation/ in data_path, which `prepare --split`
    writes, or else data_path) (no effect without eval_interval, eval_epochs or eval_at_start)."""
    eval_datasets: tuple[str, ...] = flag((), form="source name")
    """Held-out sources, as names of subfolders of eval_data_path (default: all) (no effect without
    eval_interval, eval_epochs or eval_at_start)."""
    eval_test: bool = flag(False)
    """Evaluate test/ in data_path once, after the last step."""
    test_data_path: str = flag("", form="path")
    """Folder of token shards to evaluate once, after the last step, instead of test/ in
    data_path."""
    test_steps: int | None = flag(None, min=1, max=10**6)
    """Global batches of each source in the test evaluation (default: eval_steps) (no effect without
    eval_test or test_data_path)."""
    sample_interval: int = flag(0, min=0)
    """Steps between generated texts, also after the last step; 0 is off; requires a tokenizer in
    the folder of the data."""
    sample_prompts: tuple[str, ...] = flag((), form="text or file", needs="sample_interval")
    r"""Prompts of generated texts, or a file with one prompt per line (default: a new document);
    \, is a comma within a prompt."""

    def without_effect(self) -> Iterator[WithoutEffect]:
        """Yields the flags that these settings make useless."""
        flags = ("eval_interval", "eval_epochs", "eval_at_start")
        if not self.is_on:
            names = ("eval_data_path", "eval_datasets")
            yield WithoutEffect(names, without_all(flags), "set --eval_interval", flags)
        tests = ("eval_test", "test_data_path")
        if not self.reads_held_out:
            condition = without_all((*flags, *tests))
            yield WithoutEffect(("eval_steps",), condition, "set --eval_interval", (*flags, *tests))
        if not self.eval_test and not self.test_data_path:
            yield WithoutEffect(("test_steps",), without_all(tests), "set --eval_test", tests)

    @property
    def is_on(self) -> bool:
        """Whether the run validates during training."""
        return bool(self.eval_interval or self.eval_epochs or self.eval_at_start)

    @property
    def reads_held_out(self) -> bool:
        """Whether the run evaluates anything, during training or after its last step."""
        return self.is_on or self.eval_test or bool(self.test_data_path)
