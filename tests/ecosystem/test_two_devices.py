"""Every path of the library on a device that refuses tensors of another: the values are those of the CPU."""

from __future__ import annotations

from copy import deepcopy

import pytest
import timm
import torch
import transformers as tf
from families import FAMILIES, ROWS, TEXT, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts, perturb
from safetensors.torch import load_file
from second_device import DEVICE, SecondTensor, in_use, rule, to_cpu, to_second
from torch import nn

from retex_hf import ConfigError, RetexConfig, RetexError, RetexModel
from retex_hf.recovery import closed_form

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
SMALL = {**TEXT, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "vocab_size": 20}


@pytest.fixture(autouse=True)
def second_device():
    with in_use(), torch.no_grad():
        yield


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, dict[str, nn.Module]]:
    torch.manual_seed(0)
    base = tf.BertModel(tf.BertConfig(**SMALL)).eval()
    return base, make_experts(base)


@pytest.fixture(scope="module")
def classifier():
    """A signed classifier, on the CPU and on the second device."""
    torch.manual_seed(0)
    with in_use(), torch.no_grad():
        here, experts = build_retex("bert-classifier")
        here.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
        there = deepcopy(here).to(DEVICE)
    return here, there, experts


def all_tensors(model: RetexModel) -> list[torch.Tensor]:
    signed = [] if model.signatures is None else [model.signatures.mean, model.signatures.basis]
    return [*model.parameters(), *model.buffers(), *signed]


def on_second(model: RetexModel) -> bool:
    return all(tensor.device == DEVICE for tensor in all_tensors(model))


# ---- building --------------------------------------------------------------------------------------------------------

CONFIGS = {
    "offset": {"rank": 3},
    "reversed, int8": {"rank": 3, "factor_order": "shared_first", "recovery_dtype": "int8"},
    "affine, shared": {"rank": 2, "recovery": "affine", "share_layers": True},
    "narrow, soft": {"rank": 2, "task_embedding_dim": 1, "soft_training": "dirichlet", "exclude": ["*self*", "emb*"]},
    "inner, ties": {"rank": 3, "inner_rank": 2, "merge": {"method": "ties", "density": 0.4}},
    "budget, arithmetic": {"storage": 0.3, "merge": "task_arithmetic", "feature_source": "pretrained"},
    "consensus": {"rank": 2, "merge": {"method": "consensus", "thresholds": 0.4, "scale": 0.5}},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_a_build_gives_what_the_cpu_gives(small, options):
    base, experts = small
    config = RetexConfig(**options)
    here = RetexModel.from_experts(base, experts, config, progress=False)
    there = RetexModel.from_experts(base, experts, config, device=DEVICE, progress=False)
    assert on_second(there) and not on_second(here)
    assert there.recovery_errors == pytest.approx(here.recovery_errors, rel=1e-3, abs=1e-5)
    assert_same(to_cpu(there.model.state_dict()), here.model.state_dict(), **CLOSE)
    for task in TASKS:
        assert_same(to_cpu(there.recover(task)), here.recover(task), rtol=0.02, atol=0.02)


def test_tensors_are_solved_on_the_device_and_written_in_the_folder(small, tmp_path, monkeypatch):
    base, experts = small
    seen = set()
    gram = closed_form.gram
    monkeypatch.setattr(closed_form, "gram", lambda d: seen.add(d[0].device) or gram(d))
    config = RetexConfig(rank=3)
    RetexModel.from_experts(base, experts, config, output_dir=tmp_path / "there", device=DEVICE, progress=False)
    assert seen == {DEVICE}
    RetexModel.from_experts(base, experts, config, output_dir=tmp_path / "here", progress=False)
    assert seen == {DEVICE, torch.device("cpu")}
    for file in ("model.safetensors", "retex_recovery.safetensors"):
        assert_same(*(load_file(tmp_path / place / file) for place in ("there", "here")), **CLOSE)


def test_modules_that_are_there_already_are_built_there(small):
    base, experts = small
    moved = {task: perturb(base, seed).to(DEVICE) for seed, task in enumerate(TASKS, start=1)}
    model, _ = build_from(deepcopy(base).to(DEVICE), moved)
    assert on_second(model)
    assert_same(to_cpu(model.recover("red")), experts["red"].state_dict(), **CLOSE)


def test_without_float64_the_cpu_solves_and_says_so(small, caplog):
    base, experts = small
    config = RetexConfig(rank=3)
    here = RetexModel.from_experts(base, experts, config, progress=False)
    with rule(float64=False):
        there = RetexModel.from_experts(base, experts, config, device=DEVICE, progress=False)
        added = there.add_task("more", perturb(base, 9), progress=False)
    assert caplog.text.count("has no float64: experts are merged and solved on the CPU") == 2
    assert on_second(there) and added.errors
    assert_same(to_cpu(there.recover("red")), here.recover("red"), **CLOSE)


def test_too_little_memory_is_one_sentence(small):
    base, experts = small
    with rule(largest=500), pytest.raises(RetexError, match=r"enough memory to work on '.*': take another"):
        RetexModel.from_experts(base, experts, RetexConfig(rank=3), device=DEVICE, check_base=False, progress=False)
    with rule(largest=500), pytest.raises(RetexError, match=r"enough memory to compare"):
        RetexModel.from_experts(base, experts, RetexConfig(rank=3), device=DEVICE, progress=False)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:7", r"device 'cuda:7' is not on this machine: .*\.$"),
        ("nonsense", r'device must be one of torch, such as "cuda:0", or "auto", not \'nonsense\'\.'),
        ("meta", "holds no numbers"),
    ],
)
def test_a_device_that_is_not_there_is_refused(small, tmp_path, device, message):
    base, experts = small
    for call in (
        lambda: RetexModel.from_experts(base, experts, device=device, progress=False),
        lambda: RetexModel.from_pretrained(tmp_path, device=device),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_rows_of_several_tasks(classifier, execution):
    here, there, _ = classifier
    inputs = tokens(ROWS)
    here.execution = there.execution = execution
    weights = torch.softmax(torch.randn(ROWS, 3), 1)
    for task in (MIXED, weights):
        output = there(**to_second(inputs), task=to_second(task))
        assert isinstance(output.logits, SecondTensor)
        assert_same(to_cpu(dict(output)), dict(here(**inputs, task=task)), **CLOSE)


@pytest.mark.parametrize("routing", ["hard", "soft", {"method": "hard", "far": "merged"}], ids=str)
def test_rows_are_identified(classifier, routing):
    here, there, _ = classifier
    inputs = tokens(ROWS)
    here.execution = there.execution = "auto"
    here.routing = there.routing = routing
    found, expected = there(**to_second(inputs)), here(**inputs)
    assert found.routing.tasks == expected.routing.tasks
    torch.testing.assert_close(found.routing.residuals.cpu(), expected.routing.residuals, **CLOSE)
    torch.testing.assert_close(found.logits.cpu(), expected.logits, **CLOSE)
    here.routing = there.routing = "hard"


@pytest.mark.parametrize(("name", "execution"), [("llama-tied", "mixed"), ("t5", "grouped")])
def test_generate(name, execution):
    model, _ = build_retex(name)
    model.execution = execution
    inputs, options = tokens(ROWS), {"task": MIXED, "max_new_tokens": 3}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.to(DEVICE).generate(**to_second(inputs), **options).cpu(), expected)


def test_experts_come_and_go_in_the_cache(classifier):
    here, there, _ = classifier
    size = sum(p.numel() * p.element_size() for p in here.model.parameters())
    model = RetexModel(there.parts(), expert_cache=int(1.5 * size), execution="grouped")
    inputs = tokens(1)
    for task in (*TASKS, "red", "red"):
        found = model(**to_second(inputs), task=task)
        torch.testing.assert_close(found.logits.cpu(), here(**inputs, task=task).logits, **CLOSE)
    assert model.expert_cache.evictions >= 2 and model.expert_cache.hits >= 1


def test_weight_signatures(small):
    base, experts = small
    model, _ = build_from(base, experts, signatures="weights", rank=2)
    inputs = {"input_ids": torch.randint(3, 20, (4, 6))}
    model.fit_signatures([inputs], progress=False)
    expected = model.identify(**inputs)
    found = model.to(DEVICE).identify(**to_second(inputs))
    torch.testing.assert_close(found.residuals.cpu(), expected.residuals, **CLOSE)


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_nothing_that_runs_needs_float64(classifier, tmp_path, execution):
    here, there, _ = classifier
    model = RetexModel(there.parts(), execution=execution)
    inputs = tokens(ROWS)
    with rule(float64=False):
        found = model(**to_second(inputs), task=MIXED).logits.cpu()
        model.fit_signatures({task: [to_second(tokens(6))] for task in TASKS}, progress=False)
        model.routing = {"method": "hard", "far": "merged"}
        model(**to_second(inputs))
        model.export_lora("red", tmp_path / "adapter", scope="linear")
        model.save_pretrained(tmp_path / "artifact")
    torch.testing.assert_close(found, here(**inputs, task=MIXED).logits, **CLOSE)


# ---- keeping ---------------------------------------------------------------------------------------------------------


def test_saved_and_loaded(classifier, tmp_path):
    here, there, _ = classifier
    there.save_pretrained(tmp_path / "artifact")
    inputs = tokens(ROWS)
    expected = here(**inputs, task=MIXED).logits
    for placement in ({"device": DEVICE}, {"device": str(DEVICE)}, {"device_map": str(DEVICE)}):
        loaded = RetexModel.from_pretrained(tmp_path / "artifact", **placement)
        assert on_second(loaded)
    torch.testing.assert_close(loaded(**to_second(inputs), task=MIXED).logits.cpu(), expected, **CLOSE)
    assert_same(RetexModel.from_pretrained(tmp_path / "artifact")(**inputs, task=MIXED).logits, expected, **CLOSE)
    with pytest.raises(ConfigError, match="give one of them"):
        RetexModel.from_pretrained(tmp_path / "artifact", device="cpu", device_map="auto")


def test_an_open_clip_model_goes_to_one_device(tmp_path):
    family = FAMILIES["open_clip-vit"]
    model, _ = build_retex("open_clip-vit", rank=2)
    model.save_pretrained(tmp_path / "artifact")
    loaded = RetexModel.from_pretrained(tmp_path / "artifact", device=DEVICE)
    assert on_second(loaded)
    image = family.inputs(2)["image"]
    found = loaded.encode_image(to_second(image), task=["red", "blue"])
    torch.testing.assert_close(found.cpu(), model.encode_image(image, task=["red", "blue"]), **CLOSE)
    with pytest.raises(RetexError, match="goes to one device"):
        RetexModel.from_pretrained(tmp_path / "artifact", device_map="auto")


@pytest.mark.parametrize("kind", ["module", "timm"])
def test_other_models_go_to_one_device(kind, tmp_path):
    if kind == "timm":
        base, image = timm.create_model("test_vit", num_classes=3), torch.randn(2, 3, 160, 160)
    else:
        base, image = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)), torch.randn(2, 4)
    model, _ = build_from(base.eval(), make_experts(base), rank=2)
    model.save_pretrained(tmp_path / "artifact")
    options = {} if kind == "timm" else {"make_model": lambda: deepcopy(base)}
    expected = model(image, task=["red", "blue"])
    for placement in ({"device": DEVICE}, {"device_map": {"": DEVICE}}):
        loaded = RetexModel.from_pretrained(tmp_path / "artifact", **placement, **options)
        assert on_second(loaded)
        torch.testing.assert_close(loaded(to_second(image), task=["red", "blue"]).cpu(), expected, **CLOSE)
    for spread in ("auto", {"0": "cpu", "1": str(DEVICE)}):
        with pytest.raises(ConfigError, match="goes to one device"):
            RetexModel.from_pretrained(tmp_path / "artifact", device_map=spread, **options)


@pytest.mark.parametrize("affine", [False, True], ids=["offset", "affine"])
def test_tensors_are_recovered_where_they_lie(small, affine):
    """A model that is spread over devices: the recovery is on one of them, and what it recovers on all."""
    base, experts = small
    model, _ = build_from(base, experts, recovery="affine" if affine else "offset")
    model.model.encoder.to(DEVICE)
    for recovery in ("cpu", DEVICE):
        model.recovery.to(recovery)
        found = model.recover("red")
        assert {name: tensor.device.type for name, tensor in found.items()} == {
            name: DEVICE.type if name.startswith("encoder") else "cpu" for name in found
        }
        assert_same(to_cpu(found), experts["red"].state_dict(), **CLOSE)


def test_what_the_device_has_no_room_for_is_offloaded(classifier, tmp_path):
    """Embeddings and a head wait in the CPU's memory, as `device_map` says, and run on the device with the others."""
    here, there, _ = classifier
    there.save_pretrained(tmp_path / "artifact")
    places = {"bert.embeddings": "cpu", "bert.encoder": DEVICE, "bert.pooler": DEVICE, "classifier": "cpu"}
    loaded = RetexModel.from_pretrained(tmp_path / "artifact", device_map=places)
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"meta", DEVICE.type}
    inputs = tokens(ROWS)
    expected = here(**inputs, task=MIXED).logits
    torch.testing.assert_close(loaded(**to_second(inputs), task=MIXED).logits.cpu(), expected, **CLOSE)
    assert loaded.identify(**to_second(inputs)).tasks == here.identify(**inputs).tasks


def test_tasks_come_and_go(classifier, tmp_path):
    here, there, experts = classifier
    expert = perturb(experts["red"], 9, scale=0.1)
    references, inputs = tokens(8), tokens(2)
    models = [RetexModel(model.parts()) for model in (here, there)]
    for model, batch in zip(models, (references, to_second(references)), strict=True):
        model.add_task("more", expert, references=[batch], progress=False)
        model.delete_task("green")
    assert on_second(models[1])
    assert_same(to_cpu(models[1].recover("more")), models[0].recover("more"), **CLOSE)
    assert_same(to_cpu(models[1].recover("blue")), experts["blue"].state_dict(), **CLOSE)
    assert models[1].identify(**to_second(inputs)).tasks == models[0].identify(**inputs).tasks
    models[1].fit_signatures({task: [to_second(tokens(6))] for task in models[1].tasks}, progress=False)
    assert on_second(models[1])


@pytest.mark.parametrize("options", [{}, {"recovery": "affine"}, {"inner_rank": 1}], ids=str)
def test_a_task_is_added_on_a_device_of_its_own(small, options):
    """The model on the CPU, the solver on the second device: the result comes back."""
    base, experts = small
    expert = perturb(base, 9)
    found = []
    for device in (None, DEVICE):
        model, _ = build_from(base, experts, rank=2, **options)
        model.add_task("more", expert, tolerance=0.1, device=device, progress=False)
        assert not any(tensor.device == DEVICE for tensor in all_tensors(model))
        found.append(model.recover("more"))
    assert_same(found[1], found[0], **CLOSE)


def test_one_expert_apart(classifier, tmp_path):
    here, there, _ = classifier
    inputs = tokens(2)
    expert = there.merge_and_unload("blue")
    assert all(tensor.device == DEVICE for tensor in expert.state_dict().values())
    torch.testing.assert_close(expert(**to_second(inputs)).logits.cpu(), here(**inputs, task="blue").logits, **CLOSE)
    for place, model in (("here", here), ("there", there)):
        model.export_lora("blue", tmp_path / place, scope="linear")
    there_, here_ = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("there", "here"))
    assert {name: tensor.shape for name, tensor in there_.items()} == {n: t.shape for n, t in here_.items()}
    name = next(name for name in here_ if name.endswith("lora_A.weight"))
    products = [tensors[name.replace("lora_A", "lora_B")] @ tensors[name] for tensors in (there_, here_)]
    torch.testing.assert_close(*products, **CLOSE)
