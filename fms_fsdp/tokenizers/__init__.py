"""Tokenizers behind one interface: bytes, sentencepiece, and those of Hugging Face checkpoints."""
