"""The example model is what it should be: a wrong row order or tokenizer would still load."""

from __future__ import annotations

import pytest
import torch

from examples import smollm2

pytestmark = pytest.mark.transformers


def test_model_predicts_real_text() -> None:
    model, tokenizer = smollm2.load()
    text = smollm2.long_text()[:4000]
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert tokenizer("1234")["input_ids"] == tokenizer.convert_tokens_to_ids(["1", "2", "3", "4"])
    ids = torch.tensor([tokens[:512]])
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.item()
        question = tokenizer("The capital of France is", return_tensors="pt").input_ids
        answer = tokenizer.decode(model(question).logits[0, -1].argmax())
    print(f"loss of SmolLM2 on 512 tokens of help text: {loss:.3f}")
    assert loss < 3.2  # a uniform guess: 10.8
    assert answer == " Paris"


def test_second_load_reads_the_cached_folder() -> None:
    folder = smollm2.folder()
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed


def test_long_text_is_long() -> None:
    assert len(smollm2.long_text()) > 100_000
