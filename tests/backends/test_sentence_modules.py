"""SentenceTransformers: their modules travel with the artifact, are vetted, and encode with routed experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import perturb
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, BertTokenizer

from retex_hf import RetexConfig, RetexModel, verify
from retex_hf.errors import ArtifactError, CheckpointError, RetexError

LETTERS = "abcdefghij"
OLD = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{OLD}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OLD}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{OLD}Dense"},
    {"idx": 3, "name": "3", "path": "3_Normalize", "type": f"{OLD}Normalize"},
]
DENSE = {
    "in_features": 16,
    "out_features": 4,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
POOLING = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def write(folder: Path, model: BertModel, dense: dict[str, torch.Tensor]) -> Path:
    """A folder as sentence-transformers writes it, by hand."""
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": False}))
    settings = {"prompts": {"query": "a: "}, "similarity_fn_name": "cosine", "__version__": {"pytorch": "2"}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    for name, values in (("1_Pooling", POOLING), ("2_Dense", DENSE), ("3_Normalize", None)):
        (folder / name).mkdir()
        if values is not None:
            (folder / name / "config.json").write_text(json.dumps(values))
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    config = BertConfig(
        vocab_size=15, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    base = BertModel(config).eval()
    dense = {"linear.weight": torch.randn(4, 16), "linear.bias": torch.randn(4)}
    models = {"base": base, "a": perturb(base, 1), "b": perturb(base, 2)}
    return {name: write(tmp_path / name, model, dense) for name, model in models.items()}


def build(folders: dict[str, Path], **options) -> RetexModel:
    experts = {task: folders[task] for task in "ab"}
    return RetexModel.from_experts(folders["base"], experts, RetexConfig(rank="full"), progress=False, **options)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_artifact_has_all_modules(folders, tmp_path: Path, streamed: bool):
    saved = tmp_path / "saved"
    if streamed:
        build(folders, output_dir=saved)
    else:
        build(folders).save_pretrained(saved)
    kinds = [entry["type"] for entry in json.loads((saved / "modules.json").read_text())]
    assert kinds == [entry["type"] for entry in MODULES]
    assert json.loads((saved / "1_Pooling" / "config.json").read_text()) == POOLING
    assert json.loads((saved / "2_Dense" / "config.json").read_text()) == DENSE
    own, given = (load_file(f / "2_Dense" / "model.safetensors") for f in (saved, folders["a"]))
    assert own.keys() == given.keys()
    assert all(torch.equal(own[name], given[name]) for name in own)
    settings = json.loads((saved / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == {"query": "a: "}
    assert "2_Dense/model.safetensors" in json.loads((saved / "retex_config.json").read_text())["artifact"]["files"]
    assert verify(saved, finite=True).finite
    again = RetexModel.from_pretrained(saved)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "2_Dense" / "model.safetensors").read_bytes() == (
        saved / "2_Dense" / "model.safetensors"
    ).read_bytes()


def test_layers_that_differ_are_refused(folders):
    path = folders["b"] / "2_Dense" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors differs from that of the base"):
        build(folders)
    model = RetexModel.from_experts(folders["base"], {"a": folders["a"]}, progress=False)
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors differs from that of the merged model"):
        model.add_task("b", folders["b"], progress=False)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("modules.json", lambda v: v[1].update(type="os.system"), "asks for 'os.system' as module 1"),
        ("modules.json", lambda v: v[1].update(type="sentence_transformers.util.Pooling"), "as module 1"),
        ("modules.json", lambda v: v[1].update(type=f"{OLD}Router"), "as module 1"),
        ("modules.json", lambda v: v[0].update(type="custom.Transformer"), "expected a Transformer"),
        ("modules.json", lambda v: v[1].update(path="../other"), "expected a folder such as"),
        ("modules.json", lambda v: v[1].update(path="/etc"), "expected a folder such as"),
        ("modules.json", lambda v: v[2].update(path="1_Pooling"), "two modules in one folder"),
        ("2_Dense/config.json", lambda v: v.update(activation_function="os.system"), "not a module of torch.nn"),
        ("2_Dense/config.json", lambda v: v.update(activation_function="torch.hub.load"), "not a module of torch.nn"),
        ("2_Dense/config.json", lambda v: v.update(out_features=5), "asks for"),
        ("1_Pooling/config.json", lambda v: v.update(pooling_mode="/etc/passwd"), "expected a plain word"),
    ],
)
def test_what_untrusted_modules_ask_for_is_refused(folders, file: str, change, said: str):
    path = folders["a"] / file
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=said):
        build(folders)


def test_options_of_loaders_are_left_out(folders, tmp_path: Path):
    for folder in folders.values():
        values = {"max_seq_length": 16, "tokenizer_name_or_path": "somebody/else", "model_args": {"x": "/etc"}}
        (folder / "sentence_bert_config.json").write_text(json.dumps(values))
    build(folders).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "sentence_bert_config.json").read_text()) == {"max_seq_length": 16}


def test_modules_added_to_an_artifact_are_refused(folders, tmp_path: Path):
    for folder in folders.values():
        (folder / "modules.json").unlink()
    model = build(folders)
    with pytest.raises(RetexError, match="built from SentenceTransformers"):
        model.as_sentence_transformer()
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "modules.json").write_text(json.dumps(MODULES))
    with pytest.raises(ArtifactError, match=r"modules\.json"):
        RetexModel.from_pretrained(tmp_path / "saved")


def test_sentences_are_encoded_by_their_experts(folders, tmp_path: Path):
    library = pytest.importorskip("sentence_transformers")

    def opened(folder: Path):
        return library.SentenceTransformer(str(folder), device="cpu")

    model = build(folders)
    sentences = {"a": "a b c", "b": "h i j"}
    experts = {task: opened(folders[task]) for task in "ab"}
    batches = {t: [dict(experts[t].tokenizer([s] * 4, return_tensors="pt"))] for t, s in sentences.items()}
    model.fit_signatures(batches, progress=False)
    routed = model.as_sentence_transformer().encode([sentences["b"], sentences["a"]])
    for row, task in zip(routed, "ba", strict=True):
        alone = experts[task].encode([sentences[task]])[0]
        torch.testing.assert_close(torch.tensor(row), torch.tensor(alone), rtol=1e-3, atol=1e-5)
    one = model.as_sentence_transformer("a").encode([sentences["b"]])
    torch.testing.assert_close(
        torch.tensor(one), torch.tensor(experts["a"].encode([sentences["b"]])), rtol=1e-3, atol=1e-5
    )
    # Objects give the same artifact as their folders, which the library itself opens.
    objects = RetexModel.from_experts(opened(folders["base"]), experts, RetexConfig(rank="full"), progress=False)
    encoded = []
    for name, built in (("of folders", model), ("of objects", objects)):
        built.save_pretrained(tmp_path / name)
        encoded.append(torch.tensor(opened(tmp_path / name).encode(list(sentences.values()))))
    assert torch.equal(*encoded)
