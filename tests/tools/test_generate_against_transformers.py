"""Our greedy text against that of `transformers`, of a small random model of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fms_fsdp
from fms_fsdp.generate import Sampling, generate
from tests.hf.test_import import FOLDERS, their_model

NUM_PROMPTS, NEW_TOKENS, CLOSE = 20, 200, 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_greedy_text_is_that_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, 20 prompts of 200 tokens each. A text is greedy if each token has the best logit of the reference
    after the tokens before it, so one pass over the whole text checks all of them. Where the reference's two
    best logits are within 1e-4 either may come: such rows are counted, and are few."""
    name, values = FOLDERS[kind]
    longer = {"n_positions": 256} if kind == "gpt2" else {"max_position_embeddings": 256}
    monkeypatch.setitem(FOLDERS, kind, (name, values | longer))
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path)
    ours, _ = fms_fsdp.load_model(str(tmp_path))
    draw = torch.Generator().manual_seed(4)
    prompts = [
        torch.randint(0, 300, (5 + row,), generator=draw).tolist() for row in range(NUM_PROMPTS)
    ]
    columns = list(generate(ours, prompts, Sampling(temperature=0), max_new_tokens=NEW_TOKENS))
    ties = 0
    for row, prompt in enumerate(prompts):
        text = [column[row] for column in columns if column[row] is not None]
        assert len(text) == NEW_TOKENS
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + text])).logits[0]
        before_new = logits[len(prompt) - 1 : -1]
        best = before_new.max(dim=-1).values
        gaps = best - before_new.gather(1, torch.tensor(text)[:, None])[:, 0]
        worst = int(gaps.argmax())
        assert gaps[worst] <= CLOSE, f"row {row}, token {worst}: {before_new[worst].topk(2).values}"
        ties += bool((gaps > 0).any())
    assert ties <= 2


@pytest.mark.slow
def test_logits_in_bf16_under_teacher_forcing(tmp_path: Path) -> None:
    """Position by position with the cache, against the reference's pass over the whole text."""
    from fms_fsdp.models.attention import KVCache

    for kind in FOLDERS:
        theirs = their_model(kind).bfloat16()
        theirs.save_pretrained(tmp_path / kind)
        ours, _ = fms_fsdp.load_model(str(tmp_path / kind))
        for weight in ours.parameters():
            weight.data = weight.data.bfloat16()
        tokens = torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(5))
        caches = [KVCache(48) for _ in range(ours.config.num_layers)]
        with torch.no_grad():
            found = [ours(tokens[:, at : at + 1], caches=caches) for at in range(48)]
            expected = theirs(tokens).logits
        assert (torch.cat(found, dim=1) - expected).float().abs().max() <= 3e-2, kind
