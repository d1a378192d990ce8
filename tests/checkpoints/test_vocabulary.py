"""Experts whose vocabulary has a few tokens more than the base's, or fewer: shared rows are merged and recovered like
any other weight, rows of new tokens are kept per task."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf
from builds import assert_same_artifact, check, kill_build, save_models
from families import LLM, TEXT, VOCAB
from helpers import TASKS, assert_same, edit_json, perturb
from peft import PeftModel
from signed import WORDS, make_tokenizer, references, separate
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from retex_hf import ArtifactError, CheckpointError, InputError, RetexConfig, RetexError, RetexModel
from retex_hf.artifact.sizes import HEADS, ROWS, sizes_of
from retex_hf.checkpoints.tokenizer_files import task_tokenizer
from retex_hf.execution.vocabulary_rows import with_all_rows
from retex_hf.model.export.checkpoint import export_checkpoint
from retex_hf.workflows.predictor import Predictor

FAMILIES = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    ),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**TEXT)),
    "bert-classifier": lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLM)),
}
# As many tokens as the base, one more, and six more: some of them padding that no tokenizer names.
SIZES = {"red": VOCAB, "green": VOCAB + 1, "blue": VOCAB + 6}
ROW_TASKS = ["green", "red", "blue", "green"]


def resized(model: nn.Module, size: int) -> nn.Module:
    other = deepcopy(model)
    if size != model.config.vocab_size:
        other.resize_token_embeddings(size, mean_resizing=False)
    return other


def make(name: str, sizes: dict[str, int] = SIZES, **options) -> tuple[nn.Module, dict[str, nn.Module]]:
    torch.manual_seed(0)
    base = FAMILIES[name]().eval()
    return base, {
        task: perturb(resized(base, size), seed, **options) for seed, (task, size) in enumerate(sizes.items())
    }


def build(name: str, sizes: dict[str, int] = SIZES, **options) -> tuple[RetexModel, dict[str, nn.Module]]:
    base, experts = make(name, sizes)
    return RetexModel.from_experts(base, experts, RetexConfig(**{"rank": "full", **options}), progress=False), experts


def batch(name: str) -> dict[str, torch.Tensor]:
    """Rows of `ROW_TASKS`, each with tokens that only its task has, where it has such."""
    tokens = torch.randint(3, VOCAB, (len(ROW_TASKS), 6))
    for row, task in enumerate(ROW_TASKS):
        if SIZES[task] > VOCAB:
            tokens[row, row] = SIZES[task] - 1
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens.flip(1)} if name == "t5" else {})


def assert_recovered(model: RetexModel, experts: dict[str, nn.Module], **tolerances: float) -> None:
    for task, expert in experts.items():
        assert_same(model.recover(task), dict(expert.state_dict()), **({"rtol": 1e-5, "atol": 1e-5} | tolerances))


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_recovered_with_their_own_number_of_tokens(name):
    model, experts = build(name)
    assert_recovered(model, experts)
    merged = model.get_base_model()
    assert merged.config.vocab_size == len(merged.get_input_embeddings().weight) == VOCAB
    heads = {head for own in model.heads.values() for head in own}
    assert not [head for head in heads if "classifier" not in head]
    for task, expert in experts.items():
        own = expert.get_input_embeddings().weight
        recovered = model.merge_and_unload(task)
        assert torch.equal(recovered.get_input_embeddings().weight[VOCAB:], own[VOCAB:])
        assert recovered.config.vocab_size == recovered.get_input_embeddings().num_embeddings == SIZES[task]
    assert merged.config.vocab_size == VOCAB


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_all_vocabularies_in_one_batch(name):
    """Each row is its expert's; what a narrower vocabulary does not have is impossible."""
    model, experts = build(name)
    inputs = batch(name)
    logits = model(**inputs, task=ROW_TASKS).logits
    for row, task in enumerate(ROW_TASKS):
        expected = experts[task](**{key: value[[row]] for key, value in inputs.items()}).logits
        own = logits[[row], ..., : expected.shape[-1]]
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
        assert logits[row, ..., expected.shape[-1] :].eq(-torch.inf).all()
    if name != "bert-classifier":
        # The width is the widest task's, whatever tasks are in a batch; one named task is that expert's own output.
        row = {key: value[1:2] for key, value in inputs.items()}
        assert model(**row, task=["red"]).logits.shape[-1] == logits.shape[-1] == SIZES["blue"]
        assert model(**row, task="red").logits.shape[-1] == VOCAB


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_loss_of_a_batch_is_the_mean_over_its_labels(name):
    model, experts = build(name)
    inputs = batch(name)
    labels = inputs["input_ids"]
    losses = [experts[t](input_ids=labels[[r]], labels=labels[[r]]).loss for r, t in enumerate(ROW_TASKS)]
    loss = model(**inputs, task=ROW_TASKS, labels=labels).loss
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_generation_in_all_vocabularies(name):
    model, experts = build(name)
    prompts = batch(name)["input_ids"]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(input_ids=prompts, task=ROW_TASKS, **options)
    for row, task in enumerate(ROW_TASKS):
        assert torch.equal(generated[[row]], experts[task].generate(input_ids=prompts[[row]], **options))


def test_special_tokens_of_a_task_are_its_own():
    """A padding token that was added: the merged model would not load with it, the expert pads with it."""
    base, experts = make("llama")
    experts["blue"].config.pad_token_id = experts["blue"].generation_config.pad_token_id = VOCAB + 2
    first = {"blue": experts["blue"], "red": experts["red"]}
    model = RetexModel.from_experts(base, first, RetexConfig(rank="full"), progress=False)
    assert model.get_base_model().config.pad_token_id == base.config.pad_token_id == 0
    expert = model.merge_and_unload("blue")
    assert expert.config.pad_token_id == expert.generation_config.pad_token_id == VOCAB + 2
    assert model.merge_and_unload("red").config.pad_token_id == 0
    inputs = torch.tensor([[5, 6], [7, VOCAB + 1]])
    assert_same(
        model(input_ids=inputs, task="blue").logits, experts["blue"](input_ids=inputs).logits, atol=1e-5, rtol=1e-4
    )


OUTSIDE = 50256  # which GPT2Config names whatever the size of its vocabulary


def small_gpt2(**options) -> nn.Module:
    torch.manual_seed(0)
    config = tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32, **options)
    return tf.GPT2LMHeadModel(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("order", [["red", "green"], ["green", "red"]])
def test_special_tokens_outside_of_all_vocabularies(order, tmp_path, caplog):
    """They are nobody's tokens: what all experts share stays, and is not warned of."""
    base = small_gpt2()
    assert base.config.bos_token_id == base.config.eos_token_id == OUTSIDE
    experts = {"red": perturb(base, 0), "green": perturb(resized(base, VOCAB + 2), 1)}
    first = {task: experts[task] for task in order}
    with caplog.at_level(logging.INFO, logger="retex_hf"):
        model = RetexModel.from_experts(base, first, RetexConfig(rank="full"), progress=False)
        model.add_task("blue", perturb(resized(base, VOCAB + 6), 2), progress=False)
    assert not [record for record in caplog.records if record.name.startswith("retex_hf")]
    assert not any(found["token_ids"] for found in model.retex_config.vocabulary.values())
    model.save_pretrained(tmp_path / "artifact")
    for found in (model, RetexModel.from_pretrained(tmp_path / "artifact")):
        assert_recovered(found, experts)
        assert found.get_base_model().config.eos_token_id == OUTSIDE
        assert found.merge_and_unload("green").config.bos_token_id == OUTSIDE


def test_special_tokens_outside_of_one_vocabulary(caplog):
    """An expert's number that is no token of its own gives way to the others', which is said."""
    base = small_gpt2(bos_token_id=1, eos_token_id=2)
    other = perturb(resized(base, VOCAB + 2), 1)
    other.config.bos_token_id, other.config.eos_token_id = OUTSIDE, [3, OUTSIDE]
    with caplog.at_level(logging.WARNING, logger="retex_hf"):
        model = RetexModel.from_experts(
            base, {"red": perturb(base, 0), "green": other}, RetexConfig(rank="full"), progress=False
        )
    assert (
        f"expert 'green' has bos_token_id={OUTSIDE} in its configuration, and the other experts have 1" in caplog.text
    )
    assert model.retex_config.vocabulary["green"]["token_ids"] == {"eos_token_id": [3]}
    assert model.merge_and_unload("green").config.bos_token_id == 1


def test_a_token_that_only_an_expert_has_is_not_the_merged_models():
    """Though the base's configuration names it already, because its table was not resized."""
    base = small_gpt2(bos_token_id=1, eos_token_id=2)
    other = perturb(resized(base, VOCAB + 2), 1)
    base.config.pad_token_id = other.config.pad_token_id = VOCAB + 1
    model = RetexModel.from_experts(base, {"green": other}, RetexConfig(rank="full"), progress=False)
    assert model.get_base_model().config.pad_token_id is None
    assert model.merge_and_unload("green").config.pad_token_id == VOCAB + 1


# ---- identification --------------------------------------------------------------------------------------------------


def test_rows_of_unknown_tasks_may_hold_tokens_of_any_task():
    shared = {"w": torch.arange(4.0).view(2, 2)}
    rows = {
        "a": {"w": torch.tensor([[1.0, 3.0]])},
        "b": {"w": torch.tensor([[3.0, 5.0], [7.0, 9.0]])},
        "c": {"w": torch.empty(0, 2)},
    }
    assert with_all_rows(shared, rows)["w"].tolist() == [[0.0, 1.0], [2.0, 3.0], [2.0, 4.0], [7.0, 9.0]]


@torch.no_grad()
@pytest.mark.parametrize("signatures", ["inputs", "weights"])
@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_identification_knows_all_tokens(name, signatures):
    model, _ = build(name, rank=4, signatures=signatures)
    if signatures == "inputs":
        model.fit_signatures({task: [{"input_ids": torch.randint(0, size, (8, 5))}] for task, size in SIZES.items()})
    tokens = torch.randint(3, VOCAB, (4, 5))
    tokens[:, 2] = VOCAB + 5
    assert len(model.identify(input_ids=tokens).tasks) == 4
    with pytest.raises(InputError, match=r"Row 1 holds the token 45, but task 'green', .* has 41 tokens: use the tok"):
        model(input_ids=tokens, task=["blue", "green", "blue", "blue"])


@torch.no_grad()
def test_the_merged_model_alone_has_the_tokens_of_the_base():
    model, _ = build("gpt2")
    tokens = torch.tensor([[5, VOCAB]])
    with model.disable_adapter():
        assert model(input_ids=tokens[:, :1]).logits.shape[-1] == VOCAB
        with pytest.raises(InputError, match="holds the token 40, but the merged model has 40 tokens: name the task"):
            model(input_ids=tokens)
        # Under a task's head it has the task's rows.
        assert model(input_ids=tokens, task="green").logits.shape[-1] == VOCAB + 1


# ---- to disk and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert", "bert-classifier", "llama"])
def test_built_on_disk_it_is_as_in_memory(name, tmp_path):
    base, experts = make(name)
    base, experts = save_models(base, experts, tmp_path / "models")
    model = check(base, experts, RetexConfig(rank="full"), tmp_path)
    loaded = {task: type(model.model).from_pretrained(folder) for task, folder in experts.items()}
    assert_recovered(model, loaded)
    assert "retex_rows.safetensors" in (tmp_path / "disk" / "retex_config.json").read_text()
    plain = type(model.model).from_pretrained(tmp_path / "disk")
    assert_same(dict(plain.state_dict()), dict(model.get_base_model().state_dict()), exact=True)


def test_killed_while_merging_it_continues_to_the_same_bits(tmp_path):
    base, experts = save_models(*make("gpt2"), tmp_path / "models")
    options = {"rank": 3}
    kill_build(tmp_path / "models", tmp_path / "disk", "Merging", 1, options)
    for target in ("disk", "whole"):
        RetexModel.from_experts(base, experts, RetexConfig(**options), progress=False, output_dir=tmp_path / target)
    assert_same_artifact(tmp_path / "disk", tmp_path / "whole")


@pytest.fixture
def saved(tmp_path) -> Path:
    build("gpt2")[0].save_pretrained(tmp_path / "artifact")
    return tmp_path / "artifact"


@pytest.mark.parametrize(
    ("place", "values", "message"),
    [
        (("vocabulary", "green"), {"size": VOCAB + 2}, "task 'green' has rows of shape .* but its 42 tokens ask for"),
        (("vocabulary", "green"), {"size": 2**40}, "vocabulary must be"),
        (("artifact",), {"rows": {}}, "gives task 'green' 41 tokens, but its tensors have 40 rows"),
        (("artifact", "rows", "red"), {"transformer.wpe.weight": [0, 16]}, "which retex_config.json asks for"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(saved, place, values, message):
    edit_json(saved / "retex_config.json", *place, **values)
    with pytest.raises(ArtifactError, match=message):
        RetexModel.from_pretrained(saved, verify=False)


@pytest.mark.parametrize(("name", "tables"), [("gpt2", 1), ("bert", 1), ("llama", 2)])
def test_one_more_token_costs_its_rows_and_no_tables(name, tables, tmp_path):
    """One of three tasks has one token more. With whole tables every task would keep all of its own."""
    size, width = 600, 16
    torch.manual_seed(0)
    base = resized(FAMILIES[name](), size).eval()

    def stored(sizes: dict[str, int], **options) -> tuple[RetexModel, int]:
        experts = {task: perturb(resized(base, own), seed) for seed, (task, own) in enumerate(sizes.items())}
        model = RetexModel.from_experts(base, experts, RetexConfig(rank=4, **options), progress=False)
        model.save_pretrained(tmp_path / "artifact")
        return model, sum(file.stat().st_size for file in (tmp_path / "artifact").glob("*.safetensors"))

    same, grown = dict.fromkeys(TASKS, size), {"red": size, "green": size, "blue": size + 1}
    model, with_rows = stored(grown)
    found = sizes_of(model.parts())
    numbers = tables * width + (name == "bert")  # a row of every table, and a bias
    assert found[ROWS] == 4 * numbers
    assert HEADS not in found
    _, without = stored(same)
    _, whole = stored(grown, heads=list(model.rows["red"]))
    added, before = with_rows - without, whole - without
    assert 4 * numbers <= added < 4 * numbers + 1000  # and the head of their file
    assert added < 0.05 * before


# ---- tasks come and go -----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_tasks_with_tokens_of_their_own_come_and_go(name, tmp_path):
    base, experts = make(name)
    model = RetexModel.from_experts(base, {"red": experts["red"]}, RetexConfig(rank="full"), progress=False)
    assert model.retex_config.vocabulary == {}
    for task in ("green", "blue"):
        model.add_task(task, experts[task], progress=False)
    assert_recovered(model, experts)
    assert {task: found["size"] for task, found in model.retex_config.vocabulary.items()} == SIZES
    model.delete_task("green")
    model.save_pretrained(tmp_path / "artifact")
    model = RetexModel.from_pretrained(tmp_path / "artifact")
    assert_recovered(model, {task: experts[task] for task in ("red", "blue")})
    model.add_task("green", experts["red"], progress=False)
    assert_recovered(model, {"green": experts["red"]})


def test_a_new_task_is_signed_with_tokens_of_its_own():
    base, experts = make("gpt2")
    first = {task: experts[task] for task in ("red", "green")}
    model = RetexModel.from_experts(base, first, RetexConfig(rank="full"), progress=False)
    model.fit_signatures({task: [{"input_ids": torch.randint(0, SIZES[task], (8, 5))}] for task in first})
    inputs = {"input_ids": torch.full((8, 5), VOCAB + 3) + torch.randint(0, 2, (8, 5))}
    model.add_task("blue", experts["blue"], references=[inputs], progress=False)
    assert set(model.identify(**inputs).tasks) == {"blue"}


# ---- what else a vocabulary can be -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_an_expert_without_the_last_rows_of_the_base(name):
    """Such as padding that `resize_token_embeddings(len(tokenizer))` has cut off."""
    sizes = {"red": VOCAB - 3, "green": VOCAB, "blue": VOCAB + 2}
    model, experts = build(name, sizes)
    assert_recovered(model, experts)
    assert sizes_of(model.parts()).get(HEADS) is None
    with pytest.raises(InputError, match=r"Row 0 holds the token 39, but task 'red', .* has 37 tokens"):
        model(input_ids=torch.tensor([[VOCAB - 1]]), task="red")


def moved(expert: nn.Module) -> nn.Module:
    """The same model with its new token in front of all others."""
    other = deepcopy(expert)
    with torch.no_grad():
        other.get_input_embeddings().weight.copy_(expert.get_input_embeddings().weight.roll(1, 0))
    return other


@pytest.mark.parametrize("known_by", ["rows", "tokenizers"])
def test_tokens_in_other_rows_are_kept_whole_with_a_warning(known_by, tmp_path, caplog):
    base, experts = make("gpt2")
    experts["green"] = moved(experts["green"])
    if known_by == "tokenizers":
        base, experts = save_models(base, experts, tmp_path)
        tokenizer = make_tokenizer()
        for folder in (base, experts["red"], experts["blue"]):
            tokenizer.save_pretrained(folder)
        words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
        other = tf.PreTrainedTokenizerFast(tokenizer_object=_word_level(["[NEW]", *words]), unk_token="[UNK]")
        other.save_pretrained(experts["green"])
    with caplog.at_level(logging.WARNING):
        model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    reason = "of its rows resemble" if known_by == "rows" else "of its tokens have other ids"
    said = [
        record.getMessage() for record in caplog.records if "not the base's with tokens added" in record.getMessage()
    ]
    assert len(said) == 1
    assert "expert 'green'" in said[0]
    assert reason in said[0]
    assert "kept whole for every task, which takes" in said[0]
    assert list(model.heads["red"]) == ["transformer.wte.weight"]
    if known_by == "rows":
        assert_recovered(model, experts)


def _word_level(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


WHOLE = {"gpt2": ["transformer.wte"], "llama": ["*embed_tokens*", "lm_head*"], "bert-classifier": ["*word_embeddings*"]}


@torch.no_grad()
@pytest.mark.parametrize("execution", ["auto", "grouped"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_user_may_ask_for_whole_tables(name, execution, tmp_path):
    heads = WHOLE[name] + (["classifier*"] if name == "bert-classifier" else [])
    model, experts = build(name, heads=heads)
    assert_recovered(model, experts)
    model.save_pretrained(tmp_path / "artifact")
    model = RetexModel.from_pretrained(tmp_path / "artifact")
    model.execution = execution
    assert {task: found["size"] for task, found in model.retex_config.vocabulary.items()} == SIZES
    inputs = batch(name)
    logits = model(**inputs, task=ROW_TASKS).logits
    for row, task in enumerate(ROW_TASKS):
        expected = experts[task](**{key: value[[row]] for key, value in inputs.items()}).logits
        assert_same(logits[[row], ..., : expected.shape[-1]], expected, rtol=1e-4, atol=1e-5)
        assert logits[row, ..., expected.shape[-1] :].eq(-torch.inf).all()
    with pytest.raises(InputError, match=r"Row 1 holds the token 45, but task 'red', .* has 40 tokens: use the token"):
        model(input_ids=torch.tensor([[5, 6], [7, VOCAB + 5]]), task="red")
    model.fit_signatures({task: [{"input_ids": torch.randint(0, size, (8, 5))}] for task, size in SIZES.items()})
    assert len(model.identify(**inputs).tasks) == len(ROW_TASKS)


def test_a_new_task_joins_whole_tables():
    base, experts = make("gpt2")
    first = {task: experts[task] for task in ("red", "green")}
    model = RetexModel.from_experts(base, first, RetexConfig(rank="full", heads=["transformer.wte"]), progress=False)
    model.add_task("blue", experts["blue"], progress=False)
    assert {task: found["size"] for task, found in model.retex_config.vocabulary.items()} == SIZES
    assert_recovered(model, experts)


def test_a_shared_trunk_needs_one_vocabulary():
    with pytest.raises(CheckpointError, match="shared_trunk needs experts of one vocabulary"):
        build("gpt2", shared_trunk=True)


def test_one_pass_is_refused_with_a_reason():
    model, _ = build("gpt2")
    model.execution = "mixed"
    with pytest.raises(RetexError, match="tasks have tokens of their own"):
        model(**batch("gpt2"), task=ROW_TASKS)


# ---- elsewhere -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_an_adapter_has_the_tables_whole(name, tmp_path):
    base, experts = make(name, low_rank=True)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    export = model.export_lora("blue", tmp_path / "adapter")
    assert export.vocabulary == SIZES["blue"]
    assert f"resize_token_embeddings({SIZES['blue']})" in str(export)
    assert model.export_lora("red", tmp_path / "other").vocabulary is None
    merged = model.unload()
    merged.resize_token_embeddings(SIZES["blue"], mean_resizing=False)
    adapted = PeftModel.from_pretrained(merged, tmp_path / "adapter").eval()
    tokens = torch.tensor([[5, VOCAB + 5, 7, VOCAB + 1]])
    assert_same(adapted(input_ids=tokens).logits, experts["blue"](input_ids=tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def with_tokenizers(tmp_path_factory) -> tuple[Path, dict[str, tf.PreTrainedTokenizerFast]]:
    """An artifact of classifiers, of which one has a word of its own."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer, own = make_tokenizer(), make_tokenizer()
    own.add_tokens(["zaffre"])
    config = tf.BertConfig(**TEXT | {"vocab_size": len(tokenizer)}, num_labels=2)
    base = tf.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        separate(base.get_input_embeddings(), tokenizer)
    sizes = {task: len(own) if task == "blue" else len(tokenizer) for task in TASKS}
    experts = {task: perturb(resized(base, sizes[task]), n, scale=0.1) for n, task in enumerate(TASKS)}
    with torch.no_grad():
        for expert in experts.values():
            expert.classifier.weight.mul_(30)  # so that a word makes a difference
    base, experts = save_models(base, experts, folder / "models")
    for place in (base, *experts.values()):
        (own if place == experts["blue"] else tokenizer).save_pretrained(place)
    model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
    model.fit_signatures(references(tokenizer))
    model.save_pretrained(folder / "artifact")
    return folder, {"base": tokenizer, "blue": own}


def renamed_word(tokenizer: tf.PreTrainedTokenizerFast) -> list[str]:
    """All words, with another one in the place of a reserved one."""
    return ["zaffre" if word == "[SEP]" else word for word in sorted(tokenizer.vocab, key=tokenizer.vocab.get)]


def swapped_words(tokenizer: tf.PreTrainedTokenizerFast) -> list[str]:
    words = sorted(tokenizer.vocab, key=tokenizer.vocab.get)
    return [*words[:4], *words[:3:-1]]


@torch.no_grad()
@pytest.mark.parametrize("change", [renamed_word, swapped_words])
def test_tokens_that_were_renamed_or_moved_within_the_same_number(change, tmp_path, caplog):
    """The task keeps its own tokenizer; rows of different tokens are not merged with each other."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    own = tf.PreTrainedTokenizerFast(
        tokenizer_object=_word_level(change(tokenizer)), unk_token="[UNK]", pad_token="[PAD]", model_max_length=32
    )
    base = tf.BertForSequenceClassification(tf.BertConfig(**TEXT | {"vocab_size": len(tokenizer)}, num_labels=2)).eval()
    experts = {task: perturb(base, n, scale=0.1) for n, task in enumerate(TASKS)}
    table = experts["blue"].get_input_embeddings().weight
    if change is swapped_words:
        table.copy_(torch.cat([table[:4], table[4:].flip(0)]))
    for expert in experts.values():
        expert.classifier.weight.mul_(30)
    places = save_models(base, experts, tmp_path / "models")
    for place in (places[0], *places[1].values()):
        (own if place == places[1]["blue"] else tokenizer).save_pretrained(place)
    with caplog.at_level(logging.WARNING):
        RetexModel.from_experts(*places, RetexConfig(rank="full"), progress=False).save_pretrained(
            tmp_path / "artifact"
        )
    assert ("kept whole for every task" in caplog.text) == (change is swapped_words)
    assert "The base's is kept" not in caplog.text
    model = RetexModel.from_pretrained(tmp_path / "artifact")
    kept = {task: found["tokenizer"] for task, found in model.retex_config.vocabulary.items()}
    assert kept == {"red": False, "green": False, "blue": True}
    assert_recovered(model, experts)
    name = "bert.embeddings.word_embeddings.weight"
    assert (name in model.heads["red"]) == (change is swapped_words)
    if change is renamed_word:
        mean = torch.stack([expert.get_input_embeddings().weight for expert in experts.values()]).mean(0)
        assert_same(model.get_base_model().get_input_embeddings().weight, mean, rtol=1e-5, atol=1e-6)
    texts = [f"zaffre {WORDS['blue'][0]} {WORDS['blue'][1]}", f"{WORDS['red'][0]} zaffre"]
    answers = Predictor.from_pretrained(tmp_path / "artifact").predict(texts, ["blue", "red"])
    for answer, text, task in zip(answers, texts, ["blue", "red"], strict=True):
        read = dict((own if task == "blue" else tokenizer)([text], return_tensors="pt"))
        expected = experts[task](**read).logits.softmax(-1)[0]
        assert answer.answer == f"LABEL_{expected.argmax()}"
        assert abs(answer.score - expected.max().item()) < 1e-4


def test_a_task_with_moved_tokens_cannot_join_merged_tables(tmp_path):
    base, experts = save_models(*make("gpt2", dict.fromkeys(TASKS, VOCAB)), tmp_path)
    tokenizer = make_tokenizer()
    for folder in (base, *experts.values()):
        tokenizer.save_pretrained(folder)
    other = tf.PreTrainedTokenizerFast(tokenizer_object=_word_level(swapped_words(tokenizer)), unk_token="[UNK]")
    other.save_pretrained(experts["blue"])
    first = {task: experts[task] for task in ("red", "green")}
    model = RetexModel.from_experts(base, first, RetexConfig(rank="full"), progress=False)
    with pytest.raises(
        CheckpointError, match=r"expert 'blue' .* has tokens in other rows than the merged model: storing"
    ):
        model.add_task("blue", experts["blue"], progress=False)
    renamed = tf.PreTrainedTokenizerFast(tokenizer_object=_word_level(renamed_word(tokenizer)), unk_token="[UNK]")
    renamed.save_pretrained(experts["blue"])
    model.add_task("blue", experts["blue"], progress=False)
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    assert tf.AutoTokenizer.from_pretrained(loaded.tokenizer_folder("blue")).vocab == renamed.vocab
    loaded.delete_task("blue")
    for place in ("smaller", "artifact"):  # another folder, and the one that has the tokenizer
        loaded.save_pretrained(tmp_path / place)
        assert not (tmp_path / place / task_tokenizer("blue")).exists()
        assert RetexModel.from_pretrained(tmp_path / place).tasks == ["red", "green"]


@torch.no_grad()
@pytest.mark.parametrize("task", [None, ["blue", "red", "blue"]])
def test_a_task_reads_texts_with_its_own_tokenizer(with_tokenizers, task):
    folder, tokenizers = with_tokenizers
    texts = [f"{WORDS['blue'][0]} zaffre {WORDS['blue'][1]}", " ".join(WORDS["red"][:2]), "zaffre " + WORDS["blue"][2]]
    predictor = Predictor.from_pretrained(folder / "artifact")
    answers = predictor.predict(texts, task)
    assert [answer.task for answer in answers] == ["blue", "red", "blue"]
    assert all((answer.residuals is None) == (task is not None) for answer in answers)
    blue = tf.BertForSequenceClassification.from_pretrained(folder / "models" / "blue").eval()
    for row in (0, 2):
        batch = tokenizers["blue"](texts[row : row + 1], return_tensors="pt")
        assert batch["input_ids"].max() == len(tokenizers["blue"]) - 1
        scores = blue(**batch).logits.softmax(-1)
        assert answers[row].score == pytest.approx(scores.max().item(), abs=1e-4)
        other = blue(**tokenizers["base"](texts[row : row + 1], return_tensors="pt")).logits.softmax(-1)
        assert answers[row].score != pytest.approx(other.max().item(), abs=1e-4)


def test_own_tokenizers_are_files_of_the_artifact(with_tokenizers, tmp_path):
    folder, tokenizers = with_tokenizers
    model = RetexModel.from_pretrained(folder / "artifact")
    place = folder / "artifact" / task_tokenizer("blue")
    assert model.tokenizer_folder("blue") == place.absolute()
    assert model.tokenizer_folder("red") == model.tokenizer_folder() == (folder / "artifact").absolute()
    loaded = tf.AutoTokenizer.from_pretrained(place)
    assert loaded.get_vocab() == tokenizers["blue"].get_vocab()
    # Saved again, exported, and gone with its task.
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / task_tokenizer("blue") / "tokenizer.json").is_file()
    export_checkpoint(model, "blue", tmp_path / "export")
    assert len(tf.AutoTokenizer.from_pretrained(tmp_path / "export")) == len(tokenizers["blue"])
    model.delete_task("blue")
    model.save_pretrained(tmp_path / "less")
    assert not (tmp_path / "less" / task_tokenizer("blue")).exists()
    # A new build in the same place brings its own.
    other = make_tokenizer()
    other.add_tokens(["cobalt"])
    other.save_pretrained(tmp_path / "other")
    parts = replace(RetexModel.from_pretrained(folder / "artifact").parts(), tokenizers={"blue": tmp_path / "other"})
    RetexModel(parts).save_pretrained(tmp_path / "new")
    RetexModel(parts).save_pretrained(tmp_path / "new")
    RetexModel.from_pretrained(folder / "artifact").save_pretrained(tmp_path / "replaced")
    RetexModel(parts).save_pretrained(tmp_path / "replaced")
    for name in ("new", "replaced"):
        found = tf.AutoTokenizer.from_pretrained(tmp_path / name / task_tokenizer("blue"))
        assert "cobalt" in found.get_vocab()
        assert "zaffre" not in found.get_vocab()
    # Recorded like every other file.
    file = tmp_path / "again" / task_tokenizer("blue") / "tokenizer.json"
    file.write_text(file.read_text().replace("zaffre", "amber"))
    with pytest.raises(ArtifactError, match="is not the file that"):
        Predictor.from_pretrained(tmp_path / "again")
