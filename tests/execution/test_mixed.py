"""Mixed batches in one pass give, row by row, what group by group gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import transformers as tf
from families import FAMILIES, ROWS, TEXT, tokens
from helpers import MIXED, TASKS, assert_same, build_from, build_retex, make_experts, rows_of, take
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexError, RetexModel
from retex_hf.artifact.state import RetexParts
from retex_hf.execution import Group
from retex_hf.execution.mixed import MixedModel
from retex_hf.recovery import RecoveryModule, TrainingConfig, plan_layout, solve
from retex_hf.rows import Splitter
from retex_hf.utils.tensor_bank import TensorBank

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
REFUSED = "cannot run in one pass"
# Families whose `forward` runs mixed batches in one pass. Losing one is a regression.
OFFERED = [
    "bert", "bert-classifier", "roberta", "vit", "swin", "convnext", "resnet", "t5", "bart", "whisper", "gpt2",
    "llama-tied", "llama-untied", "mamba", "open_clip-coca",
]  # fmt: skip
NOT_OFFERED = sorted(set(FAMILIES) - set(OFFERED))
IMAGE_ENTRY_POINTS = {
    "clip": ("pixel_values", "get_image_features"),
    "siglip": ("pixel_values", "get_image_features"),
    "open_clip-vit": ("image", "encode_image"),
    "open_clip-custom-text": ("image", "encode_image"),
    "open_clip-coca": ("images", "encode_image"),
}
FROZEN_TEXT = ["clip", "siglip", "open_clip-vit", "open_clip-custom-text"]


def run(model: RetexModel, execution: str, inputs: dict, method: str = "forward", task=MIXED, **options):
    model.execution = execution
    call = model if method == "forward" else getattr(model, method)
    return call(**inputs, task=task, **options)


def assert_equal_rows(model: RetexModel, inputs: dict, *args, tolerances=CLOSE, **options) -> None:
    grouped = run(model, "grouped", inputs, *args, **options)
    assert_same(run(model, "mixed", inputs, *args, **options), grouped, **tolerances)


def differs_from_merged(model: RetexModel, inputs: dict) -> bool:
    """Whether recovery matters for a batch: else equality would say nothing."""
    with model.disable_adapter():
        merged = model(**inputs)
    recovered = run(model, "grouped", inputs)
    first = next(iter(merged)) if isinstance(merged, dict) else 0
    return not torch.allclose(merged[first], recovered[first], rtol=1e-2, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("name", OFFERED)
def test_a_forward_pass_equals_the_grouped_one(name):
    model, _ = build_retex(name, rank=4)
    inputs = FAMILIES[name].inputs(ROWS)
    assert_equal_rows(model, inputs)
    assert differs_from_merged(model, inputs) or name == "bert-classifier"  # small logits


@torch.no_grad()
@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_is_not_offered_is_refused_and_runs_group_by_group(name):
    model, _ = build_retex(name, rank=4, expert_cache=0)  # without a cache, one pass is wanted
    inputs = FAMILIES[name].inputs(ROWS)
    with pytest.raises(RetexError, match=REFUSED):
        run(model, "mixed", inputs)
    assert_same(run(model, "auto", inputs), run(model, "grouped", inputs), exact=True)


@torch.no_grad()
@pytest.mark.parametrize("name", IMAGE_ENTRY_POINTS)
def test_image_features(name):
    model, _ = build_retex(name, rank=4)
    argument, entry_point = IMAGE_ENTRY_POINTS[name]
    images = next(iter(FAMILIES[name].inputs(ROWS).values()))
    assert_equal_rows(model, {argument: images}, entry_point)


def freeze_text(base: nn.Module, experts: dict[str, nn.Module]) -> None:
    for expert in experts.values():
        state = expert.state_dict()
        for name, tensor in base.state_dict().items():
            if not name.startswith(("vision_model", "visual")):
                state[name].copy_(tensor)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "prompts"), [*((name, 4) for name in FROZEN_TEXT), ("clip", 2), ("clip", ROWS), ("open_clip-vit", 2)]
)
def test_class_prompts_of_a_frozen_text_tower(name, prompts):
    """As many prompts as a pair has rows, as the batch has, and another number."""
    family = FAMILIES[name]
    base = family.make().eval()
    experts = make_experts(base)
    freeze_text(base, experts)
    model, _ = build_from(base, experts, family.model_config, rank=4)
    inputs = family.inputs(ROWS)
    texts = {key: value[:1].repeat(prompts, 1) for key, value in inputs.items() if len(value) == 4}
    for value in texts.values():
        if value.max() > 1:
            value[:, 1] = torch.arange(3, 3 + prompts)
    assert_equal_rows(model, inputs | texts)


# ---- variants of the recovery ----------------------------------------------------------------------------------------

VARIANTS = {
    "full": {"rank": "full"},
    "rank 1": {"rank": 1},
    "inner": {"rank": 4, "inner_rank": 2},
    "shared first": {"rank": 4, "factor_order": "shared_first"},
    "inner, shared first": {"rank": 4, "inner_rank": 2, "factor_order": "shared_first"},
    "affine": {"rank": 4, "recovery": "affine"},
    "affine, full": {"rank": "full", "recovery": "affine"},
    "shared layers": {"rank": 4, "share_layers": True},
    "narrow embedding": {"rank": 4, "task_embedding_dim": 1},
    "exclude": {"rank": 4, "exclude": ["*embed*", "*shared*", "*wte*", "*.0.*"]},
    "bfloat16": {"rank": 4, "recovery_dtype": "bfloat16"},
    "int8": {"rank": 4, "recovery_dtype": "int8"},
}


# One layer of each: a linear layer, an embedding with and without rows, a layer kept transposed, a convolution.
SMALL = {
    "t5-encoder": lambda: (
        tf.T5EncoderModel(tf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)).eval(),
        tokens(ROWS),
    ),
    "gpt2": lambda: (
        tf.GPT2Model(tf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval(),
        tokens(ROWS),
    ),
    "resnet": lambda: (
        tf.ResNetModel(
            tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ).eval(),
        FAMILIES["resnet"].inputs(ROWS),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "variant"),
    [("t5-encoder", variant) for variant in VARIANTS]
    + [("gpt2", variant) for variant in ("full", "inner, shared first", "affine", "narrow embedding", "int8")]
    + [("resnet", variant) for variant in ("full", "rank 1", "inner", "shared first", "affine", "shared layers")],
)
def test_variants_of_the_recovery(name, variant):
    base, inputs = SMALL[name]()
    model, _ = build_from(base, make_experts(base), **VARIANTS[variant])
    assert_equal_rows(model, inputs)
    mixtures = torch.tensor([[1.0, 0, 0], [0.2, 0.3, 0.5], [0, 1.0, 0], [0.2, 0.3, 0.5], [0, 0.5, 0.5], [1.0, 0, 0]])
    assert_equal_rows(model, inputs, task=mixtures)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_trained_recovery(name):
    """Generators have biases, and the scalars of vectors are not 1."""
    base = FAMILIES[name].make().eval()
    training = TrainingConfig(steps=20, warmup_steps=1, learning_rate=0.1)
    model = RetexModel.from_experts(
        base, make_experts(base), RetexConfig(rank=4), solver="adam", training=training, progress=False
    )
    vector = next(name for name in model.recovery if model.recovery[name].layout.kind == "vector")
    assert model.recovery[vector].bias.abs().max() > 0 and model.recovery[vector].shared != 1
    with torch.no_grad():
        assert_equal_rows(model, FAMILIES[name].inputs(ROWS))


# ---- rows and other axes that have the same size by chance -----------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "rows"), [*(("t5", rows) for rows in (1, 2, 4, 8)), ("bert", 2), ("bert", 8), ("gpt2", 2), ("gpt2", 8)]
)
def test_as_many_rows_as_something_else_has_entries(name, rows):
    """2 heads, 8 tokens, 4 and 8 divisors and multiples of both; relative positions lead with the query length."""
    model, _ = build_retex(name, rank=4)
    inputs = FAMILIES[name].inputs(rows)
    task = [TASKS[row % 3] for row in range(rows)]
    assert_equal_rows(model, inputs, task=task)
    assert_equal_rows(model, FAMILIES[name].inputs(ROWS))  # what a probe of some rows found out serves others


@torch.no_grad()
def test_a_call_on_one_task_does_not_certify_mixed_batches():
    model, _ = build_retex("t5", rank=4)
    inputs = FAMILIES["t5"].inputs(4)
    assert_equal_rows(model, inputs, task="red")
    assert_equal_rows(model, inputs, task=["blue", "red", "green", "red"])


@torch.no_grad()
def test_position_ids_with_and_without_rows():
    model, _ = build_retex("gpt2", rank=4)
    inputs = tokens(ROWS)
    positions = torch.arange(8)[None]
    assert_equal_rows(model, inputs | {"position_ids": positions})
    assert_equal_rows(model, inputs | {"position_ids": (positions + torch.arange(ROWS)[:, None])})
    assert_equal_rows(model, inputs | {"position_ids": positions})


class Positions(nn.Module):
    """A parameter meets values that were computed from a table without rows, of as many entries as may be."""

    main_input_name = "x"

    def __init__(self, entries: int = 9) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.arange(entries * 4.0).view(entries, 4) / 10, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scale.exp() * self.table).sum(0)


def runner_of(module: nn.Module, name: str, offsets: list[Tensor]) -> MixedModel:
    layout = plan_layout(tuple(offsets[0].shape), rank="full", num_tasks=len(offsets))
    recovery = RecoveryModule.from_solutions({name: solve(offsets, layout)}, num_tasks=len(offsets))
    return MixedModel(module.eval(), recovery, [str(i) for i in range(len(offsets))], {})


@torch.no_grad()
def test_a_computed_value_that_meets_a_table_is_never_taken_for_rows():
    """Nine entries are no multiple of a probe's two rows, but of three."""
    module = Positions()
    offsets = [torch.randn(4) for _ in range(3)]
    mixed = runner_of(module, "scale", offsets)
    groups = [Group(task, torch.tensor([task])) for task in range(3)]
    segments = mixed.segments(groups)
    x = torch.randn(3, 4)
    certificate, _ = mixed.probe("forward", {"x": x}, segments, Splitter(3, frozenset()))
    expected = torch.stack([x[i] + ((module.scale + offsets[i]).exp() * module.table).sum(0) for i in range(3)])
    torch.testing.assert_close(mixed.run("forward", {"x": x}, segments, certificate), expected)


# ---- heads -----------------------------------------------------------------------------------------------------------

WIDTHS = {"red": 2, "green": 5, "blue": 3}


def build_heads(folder, cls: type) -> RetexModel:
    base = tf.BertModel(tf.BertConfig(**TEXT))
    base.save_pretrained(folder / "base")
    for task, body in make_experts(base).items():
        expert = cls(tf.BertConfig(**TEXT, num_labels=WIDTHS[task])).eval()
        expert.bert.load_state_dict(body.state_dict(), strict=False)
        nn.init.normal_(expert.classifier.weight)
        expert.save_pretrained(folder / task)
    paths = {task: str(folder / task) for task in TASKS}
    return RetexModel.from_experts(str(folder / "base"), paths, RetexConfig(rank=4), progress=False)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> RetexModel:
    torch.manual_seed(0)
    return build_heads(tmp_path_factory.mktemp("heads"), tf.BertForSequenceClassification)


@torch.no_grad()
@pytest.mark.parametrize("task", [MIXED, ["red", "blue"] * 3, ["red"] * 6, "red", "green"])
def test_heads_of_different_widths(classifier, task):
    """Padded to the widest head of the model, whether the batch has it or not; one named task has its own width."""
    inputs = tokens(ROWS)
    assert_equal_rows(classifier, inputs, task=task)
    logits = run(classifier, "mixed", inputs, task=task).logits
    assert logits.shape[1] == (WIDTHS[task] if isinstance(task, str) else 5)
    names = [task] * ROWS if isinstance(task, str) else task
    finite = logits.isfinite().sum(1).tolist()
    assert finite == [WIDTHS[name] for name in names]


@torch.no_grad()
def test_heads_of_token_classifiers(tmp_path):
    model = build_heads(tmp_path, tf.BertForTokenClassification)
    inputs = tokens(ROWS)
    assert_equal_rows(model, inputs)
    assert run(model, "mixed", inputs).logits.shape == (ROWS, 8, 5)


@torch.no_grad()
def test_losses_of_heads_go_group_by_group(classifier):
    inputs = tokens(ROWS) | {"labels": torch.tensor([4, 1, 2, 0, 1, 0])}
    with pytest.raises(RetexError, match=f"{REFUSED}: tasks have losses of their own"):
        run(classifier, "mixed", inputs)
    assert_same(run(classifier, "auto", inputs), run(classifier, "grouped", inputs), exact=True)


@torch.no_grad()
def test_the_loss_of_a_language_model_is_that_of_all_rows():
    model, _ = build_retex("gpt2", rank=4)
    inputs = tokens(ROWS)
    assert_equal_rows(model, inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)})


# ---- gradients, modes, precision -------------------------------------------------------------------------------------


def input_gradients(model: RetexModel, execution: str, embeds: Tensor, mask: Tensor) -> Tensor:
    embeds = embeds.clone().requires_grad_()
    output = run(model, execution, {"inputs_embeds": embeds, "attention_mask": mask})
    (output[0] * torch.linspace(-1, 1, output[0].shape[-1])).sum().backward()
    return embeds.grad


@pytest.mark.parametrize(("name", "order"), [("bert", "generated_first"), ("gpt2", "shared_first")])
def test_gradients_of_inputs_and_of_nothing_else(name, order):
    model, _ = build_retex(name, rank=4, factor_order=order)
    model.recovery.requires_grad_()
    embeds, mask = torch.randn(ROWS, 8, 16), tokens(ROWS)["attention_mask"]
    grouped = input_gradients(model, "grouped", embeds, mask)
    assert grouped.abs().max() > 0
    torch.testing.assert_close(input_gradients(model, "mixed", embeds, mask), grouped, rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in model.recovery.parameters())


def test_training_mode_goes_group_by_group():
    model, _ = build_retex("bert", rank=4)
    inputs = tokens(ROWS)
    model.train()
    with pytest.raises(RetexError, match=f"{REFUSED}: the model is in training mode"):
        run(model, "mixed", inputs)
    torch.manual_seed(1)
    grouped = run(model, "grouped", inputs)
    torch.manual_seed(1)
    assert_same(run(model, "auto", inputs), grouped, exact=True)
    model.eval()
    with torch.no_grad():
        assert_equal_rows(model, inputs)


@pytest.mark.parametrize("first", ["inference", "no_grad"])
def test_inference_mode(first):
    model, _ = build_retex("gpt2", rank=4)
    inputs = tokens(ROWS)
    modes = [torch.inference_mode, torch.no_grad]
    for mode in modes if first == "inference" else modes[::-1]:
        with mode():
            assert_equal_rows(model, inputs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"), [("t5", torch.bfloat16), ("gpt2", torch.float16), ("convnext", torch.bfloat16)]
)
def test_low_precision(name, dtype):
    model, _ = build_retex(name, rank=4)
    model.to(dtype)
    inputs = FAMILIES[name].inputs(ROWS)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    grouped, mixed = run(model, "grouped", inputs)[0], run(model, "mixed", inputs)[0]
    assert mixed.dtype == dtype
    step = torch.finfo(dtype).eps * grouped.abs().max().item()
    torch.testing.assert_close(mixed, grouped, rtol=0, atol=16 * step)


@torch.no_grad()
def test_autocast():
    model, _ = build_retex("bert", rank=4)
    inputs = tokens(ROWS)
    exact = run(model, "grouped", inputs)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grouped, mixed = run(model, "grouped", inputs)[0], run(model, "mixed", inputs)[0]
    assert mixed.dtype == grouped.dtype
    assert (mixed - exact).abs().max() < 2 * (grouped - exact).abs().max()


# ---- the model around it ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_threads_with_different_assignments():
    model, _ = build_retex("t5", rank=4)
    batches = [FAMILIES["t5"].inputs(ROWS) for _ in range(8)]
    tasks = [[TASKS[(row * shift + shift) % 3] for row in range(ROWS)] for shift in range(8)]
    model.execution = "mixed"

    def call(index: int) -> Tensor:
        with torch.no_grad():  # the switch belongs to a thread
            return model(**batches[index], task=tasks[index]).logits

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(call, range(8)))
    for index in range(8):
        assert torch.equal(together[index], call(index))


class Interrupted(Exception):
    pass


@torch.no_grad()
def test_the_merged_model_stays_as_it_is_also_when_a_call_raises():
    model, _ = build_retex("bert", rank=4)
    inputs = tokens(ROWS)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    identities = [id(parameter) for parameter in model.model.parameters()]
    grouped = run(model, "grouped", inputs)
    calls = []

    def interrupt(module, args):
        calls.append(module)
        if len(calls) == 5:
            raise Interrupted

    run(model, "mixed", inputs)
    handle = model.model.encoder.layer[1].register_forward_pre_hook(interrupt)
    model.expert_cache.clear()  # hooks act on copies that are made afterwards
    with pytest.raises(Interrupted):
        for _ in range(5):
            run(model, "mixed", inputs)
    handle.remove()
    after = model.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert [id(parameter) for parameter in model.model.parameters()] == identities
    assert_same(run(model, "mixed", inputs), grouped, **CLOSE)


@torch.no_grad()
def test_hooks_of_the_user_run():
    model, _ = build_retex("bert", rank=4)
    inputs = tokens(ROWS)
    seen = []
    model.model.encoder.layer[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    model.model.encoder.layer[1].register_forward_hook(lambda module, args, output: 2 * output)
    doubled = run(model, "mixed", inputs)
    assert seen[-1] == ROWS  # the whole batch, once
    assert_same(doubled, run(model, "grouped", inputs), **CLOSE)


@torch.no_grad()
def test_a_changed_model_is_copied_anew():
    model, _ = build_retex("bert", rank=4)
    inputs = tokens(ROWS)
    first = run(model, "mixed", inputs)[0]
    assert "mixed" in model.expert_cache
    model.double()
    assert "mixed" not in model.expert_cache
    torch.testing.assert_close(run(model, "mixed", inputs)[0], first.double(), rtol=1e-4, atol=1e-5)
    parts = {task: [take(inputs, rows_of(task))] * 4 for task in TASKS}
    model.retex_config = replace(model.retex_config, signature_rank=1)
    model.fit_signatures(parts, progress=False)
    assert "mixed" not in model.expert_cache
    run(model, "mixed", inputs)
    model.train()
    model.eval()
    assert "mixed" not in model.expert_cache


@torch.no_grad()
def test_what_a_probe_did_not_show_is_run_group_by_group():
    """A layer that cuts a batch of six rows in two: four rows alone say nothing about whose they are."""
    model, _ = build_retex("bert", rank=4, expert_cache=0)
    dense = model.model.encoder.layer[0].intermediate.dense
    forward = type(dense).forward
    seen = []

    class Regrouping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            if len(x) != 6:
                return forward(self, x)
            return torch.cat([forward(self, part) for part in x.split(4)])

    dense.__class__ = Regrouping
    inputs = tokens(ROWS)
    with pytest.raises(RetexError, match=f"{REFUSED}: the model calls split, which it did not do in a probe"):
        run(model, "mixed", inputs)
    grouped = run(model, "grouped", inputs)
    assert_same(run(model, "auto", inputs), grouped, exact=True)
    assert 6 in seen


def test_an_unknown_execution_is_refused():
    with pytest.raises(RetexError, match="execution must be one of"):
        RetexModel(build_parts(), execution="both")


def build_parts():
    model, _ = build_retex("bert", rank=4)
    return RetexParts(
        config=model.retex_config, model=model.model, recovery=model.recovery, heads=TensorBank(), errors={}
    )


@torch.no_grad()
def test_a_bad_batch_does_not_spoil_the_next():
    model, _ = build_retex("bert")
    model.execution = "mixed"
    with pytest.raises(IndexError):  # what the model itself says of it
        model(input_ids=torch.full((len(MIXED), 8), 10_000), task=MIXED)
    inputs = {"input_ids": torch.randint(3, 40, (len(MIXED), 8))}
    one_pass = model(**inputs, task=MIXED)
    model.execution = "grouped"
    assert_same(one_pass, model(**inputs, task=MIXED), rtol=1e-4, atol=1e-5)
