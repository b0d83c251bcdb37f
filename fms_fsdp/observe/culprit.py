"""Which data a step was made of, for messages about steps that went wrong."""

from __future__ import annotations

from fms_fsdp.data.stream import Stream
from fms_fsdp.observe.report import Reporter


def describe_data(stream: Stream, reporter: Reporter, step: int) -> str:
    """Fingerprint and first documents of the global batch of `step`, as a sentence (collective: every rank). Reads the batch once more."""
    batch = stream.batch_at(step)
    if batch is None:
        return "The data come from a stream of your own."
    text = f"Data fingerprint {reporter.global_fingerprint(batch)}"
    documents = stream.documents(step)
    return f"{text}; documents: {', '.join(documents)}, …" if documents else f"{text}; synthetic tokens."
