"""Which data a step was made of, for messages about steps that went wrong."""

from __future__ import annotations

from typing import Any

from fms_fsdp.observe.report import Reporter


def describe_data(stream: Any, reporter: Reporter, step: int) -> str:
    """Fingerprint and first documents of the global batch of `step`, as a sentence (collective: every rank). Reads the batch once more."""
    if not hasattr(stream, "batch_at"):
        return "The data come from a stream of your own."
    text = f"Data fingerprint {reporter.global_fingerprint(stream.batch_at(step))}"
    documents = stream.documents(step)
    return f"{text}; documents: {', '.join(documents)}, …" if documents else f"{text}; synthetic tokens."
