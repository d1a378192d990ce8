"""Parameters that a class computes, and that are in no file: the positions of MarianMT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from families import VOCAB
from helpers import TASKS, make_experts

from retex_hf import CheckpointError, RetexConfig, RetexModel

COMPUTED = "model.encoder.embed_positions.weight"


@pytest.fixture
def marian() -> tf.MarianMTModel:
    config = tf.MarianConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, max_position_embeddings=32, init_std=0.5,
    )  # fmt: skip
    return tf.MarianMTModel(config).eval()


def experts_of(base: tf.MarianMTModel) -> dict[str, tf.MarianMTModel]:
    """Experts as training leaves them: it does not move what is computed."""
    experts = make_experts(base)
    for expert in experts.values():
        for stack in (expert.model.encoder, expert.model.decoder):
            stack.embed_positions.weight.data = base.model.encoder.embed_positions.weight.data.clone()
    return experts


@pytest.mark.parametrize("on_disk", [True, False])
def test_experts_from_files_and_from_memory(marian, on_disk, tmp_path: Path):
    experts = sources = experts_of(marian)
    if on_disk:
        sources = {task: tmp_path / task for task in TASKS}
        for task, folder in sources.items():
            experts[task].save_pretrained(folder)
        marian.save_pretrained(tmp_path / "base")
    base = tmp_path / "base" if on_disk else marian
    model = RetexModel.from_experts(base, sources, RetexConfig(rank="full"), progress=False)
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    inputs = torch.randint(3, VOCAB, (len(TASKS), 6))
    start = torch.zeros(len(TASKS), 1, dtype=torch.long)
    for built in (model, loaded):
        with torch.no_grad():
            found = built(input_ids=inputs, decoder_input_ids=start, task=list(TASKS)).logits
            for row, task in enumerate(TASKS):
                alone = experts[task](input_ids=inputs[[row]], decoder_input_ids=start[[row]]).logits
                torch.testing.assert_close(found[[row]], alone, rtol=1e-3, atol=1e-4)


def test_other_numbers_are_refused(marian):
    experts = experts_of(marian)
    experts["red"].model.encoder.embed_positions.weight.data += 0.1
    with pytest.raises(CheckpointError, match=f"'{COMPUTED}' is computed by MarianMTModel and stored in no file"):
        RetexModel.from_experts(marian, experts, RetexConfig(rank="full"), progress=False)
