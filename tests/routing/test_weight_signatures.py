"""Identification from the experts' own weights: the scores are what they are defined to be, and they identify."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, TEXT, tokens
from helpers import TASKS, assert_same, build_from, build_retex, make_experts, perturb
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.pytorch_utils import Conv1D
from trust.mutations import reseal

from retex_hf import ArtifactError, ConfigError, InputError, RetexConfig, RetexError, RetexModel
from retex_hf.backends import library_of
from retex_hf.backends.input_forms import Signal, Tokens
from retex_hf.routing import Signatures, WeightSignatures, synthetic_batches

OPTIONS = {
    "low rank": {"rank": 3},
    "full": {"rank": "full"},
    "shared first": {"rank": 3, "factor_order": "shared_first"},
    "inner": {"rank": 3, "inner_rank": 2},
    "inner, shared first": {"rank": 3, "inner_rank": 2, "factor_order": "shared_first"},
    "shared layers": {"rank": 3, "share_layers": True},
    "narrow": {"rank": 3, "task_embedding_dim": 2},
    "int8": {"rank": 3, "recovery_dtype": "int8"},
}


def build(family: str, **options) -> RetexModel:
    return build_retex(family, **{"rank": 3, "signatures": "weights", **options})[0]


def act(module: nn.Module, matrix: Tensor, hidden: Tensor) -> Tensor:
    """A layer with another weight and no bias; one row of numbers per input row and position."""
    if isinstance(module, nn.Conv2d):
        kernel = matrix.view_as(module.weight)
        out = torch.nn.functional.conv2d(hidden, kernel, None, module.stride, module.padding, module.dilation)
        return out.flatten(2).mT
    return hidden @ (matrix if isinstance(module, Conv1D) else matrix.T)


@torch.no_grad()
def defined_scores(model: RetexModel, prefix: str, inputs: dict[str, Tensor], run=None) -> Tensor:
    """The definition, layer by layer: every update as a matrix, applied to what enters the layer."""
    entering = {}
    base = model.get_base_model()
    layers = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, (nn.Linear, Conv1D, nn.Conv2d)) and name.startswith(prefix)
        and "pooler" not in name  # it runs after the last block
        and f"{name}.weight" in model.recovery and model.recovery[f"{name}.weight"].layout.kind != "vector"
    }  # fmt: skip
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: entering.update({name: args[0]}))
        for name, module in layers.items()
    ]
    (run or base)(**inputs)
    for hook in hooks:
        hook.remove()
    mask = inputs.get("attention_mask")
    scores = []
    for name, hidden in entering.items():
        columns = []
        for task in TASKS:
            update = model.recover(task)[f"{name}.weight"] - base.state_dict()[f"{name}.weight"]
            energy = act(layers[name], update, hidden).double().square().sum(-1)  # (rows, tokens)
            energy = energy.reshape(len(energy), -1)
            weights = torch.ones_like(energy) if mask is None else mask.double()
            mean = (energy * weights).sum(1) / weights.sum(1)
            columns.append((mean / update.double().square().sum()).log())
        scores.append(torch.stack(columns, 1))
    assert scores
    return torch.stack(scores).mean(0).float()


@torch.no_grad()
def expected_residuals(model: RetexModel, prefix: str, inputs: dict[str, Tensor], run=None) -> Tensor:
    """How much less than to synthetic inputs the updates respond to these."""
    base = model.get_base_model()
    batches = synthetic_batches(library_of(base).input_form(base))
    centre = torch.cat([defined_scores(model, prefix, batch, run) for batch in batches]).mean(0)
    return centre - defined_scores(model, prefix, inputs, run)


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_score_is_the_mean_log_response_of_the_update(options):
    model, inputs = build("bert", **options), tokens(6)
    found = model.identify(**inputs)
    expected = expected_residuals(model, "encoder.", inputs)
    torch.testing.assert_close(found.residuals, expected, rtol=1e-3, atol=1e-4)
    assert found.task_ids.tolist() == expected.argmin(1).tolist()
    torch.testing.assert_close(found.probabilities, (-expected).softmax(1), rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("order", ["generated_first", "shared_first"])
@pytest.mark.parametrize(
    ("family", "prefix"),
    [("gpt2", "transformer.h."), ("resnet", ""), ("vit", ""), ("t5", "encoder."), ("llama-tied", "model.layers.")],
)
def test_every_kind_of_layer_has_its_response(family, prefix, order):
    model = build(family, factor_order=order)
    inputs = FAMILIES[family].inputs(5)
    run = None
    if family == "t5":
        inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
        run = model.get_base_model().get_encoder()
    found = model.identify(**inputs).residuals
    torch.testing.assert_close(found, expected_residuals(model, prefix, inputs, run), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_image_side_of_a_dual_encoder_is_heard():
    model = build("open_clip-vit")
    image = torch.randn(5, 3, 32, 32)
    routed = model.encode_image(image)
    found = model.identify(image)
    expected = expected_residuals(model, "visual.", {"image": image}, model.get_base_model().encode_image)
    torch.testing.assert_close(found.residuals, expected, rtol=1e-3, atol=1e-4)
    for row, task in enumerate(found.tasks):
        expected = model.encode_image(image, task=task)[row]
        torch.testing.assert_close(routed[row], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_feature_layer_limits_how_deep_the_pass_goes():
    inputs = tokens(4)
    for layer in (0, "encoder.layer.0"):
        model = build("bert", feature_layer=layer)
        ran = []
        model.get_base_model().encoder.layer[1].register_forward_hook(lambda *_, ran=ran: ran.append(1))
        model.expert_cache.clear()
        found = model.identify(**inputs).residuals
        assert ran == []
        torch.testing.assert_close(found, expected_residuals(model, "encoder.layer.0.", inputs), rtol=1e-3, atol=1e-4)


def aligned_experts(base: nn.Module, directions: Tensor) -> dict[str, nn.Module]:
    """Experts whose updates respond to one direction of the input each."""
    experts = {}
    for task, direction in zip(TASKS, directions, strict=True):
        expert = perturb(base, 0, scale=0.0)
        expert.load_state_dict(base.state_dict())
        for layer in expert.encoder.layer:
            layer.attention.self.query.weight.data += 0.1 * torch.outer(torch.randn(16), direction)
        experts[task] = expert
    return experts


@torch.no_grad()
def test_a_row_goes_to_the_task_whose_update_it_excites():
    base = BertModel(BertConfig(**TEXT, layer_norm_eps=1e-12)).eval()
    directions = torch.linalg.qr(torch.randn(16, 16)).Q.T[:3]
    directions = directions - directions.mean(1, keepdim=True)
    model, _ = build_from(
        base, aligned_experts(base, directions), rank=3, signatures="weights", feature_layer=0, routing="hard"
    )
    rows = torch.tensor([2, 0, 1, 1])
    inputs_embeds = 50 * directions[rows].unsqueeze(1).expand(-1, 5, -1)
    assert model.identify(inputs_embeds=inputs_embeds).task_ids.tolist() == rows.tolist()
    output = model(inputs_embeds=inputs_embeds)
    assert output.routing.task_ids.tolist() == rows.tolist()


@torch.no_grad()
def test_centring_subtracts_the_mean_scores_of_a_pool():
    model, pool, inputs = build("bert"), [tokens(4), tokens(7)], tokens(6)
    plain = model.identify(**inputs).residuals
    mean = -torch.cat([model.identify(**batch).residuals for batch in pool]).mean(0)
    assert model.fit_signatures(pool) == {}
    assert isinstance(model.signatures, WeightSignatures)
    torch.testing.assert_close(model.identify(**inputs).residuals, plain + mean, rtol=1e-4, atol=1e-4)
    pooled = torch.cat([model.identify(**batch).residuals for batch in pool])
    torch.testing.assert_close(pooled.mean(0), torch.zeros(3), rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("centred", [False, True])
def test_saved_and_loaded(tmp_path, centred):
    model, inputs = build("bert"), tokens(6)
    if centred:
        model.fit_signatures(tokens(9))
    expected = model.identify(**inputs).residuals
    model.save_pretrained(tmp_path / "artifact")
    assert (tmp_path / "artifact" / "retex_signatures.safetensors").exists() == centred
    loaded = RetexModel.from_pretrained(tmp_path / "artifact")
    assert loaded.retex_config.signatures == "weights"
    assert torch.equal(loaded.identify(**inputs).residuals, expected)
    loaded.save_pretrained(tmp_path / "twin")
    assert_same(RetexModel.from_pretrained(tmp_path / "twin").identify(**inputs).residuals, expected, exact=True)


def test_signatures_of_the_other_kind_are_refused(tmp_path):
    model = build("bert")
    model.fit_signatures(tokens(9))
    model.save_pretrained(tmp_path / "artifact")
    path = tmp_path / "artifact" / "retex_config.json"
    path.write_text(path.read_text().replace('"signatures": "weights"', '"signatures": "inputs"'))
    reseal(tmp_path / "artifact")
    with pytest.raises(ArtifactError, match="the signatures are not valid"):
        RetexModel.from_pretrained(tmp_path / "artifact")
    path.write_text(path.read_text().replace('"signatures": "inputs"', '"signatures": "weights"'))
    text = path.read_text()
    path.write_text(text.replace('"tasks": [', '"tasks": ["more",').replace('"heads": {', '"heads": {"more": {},'))
    reseal(tmp_path / "artifact")
    with pytest.raises(ArtifactError, match="has shape"):
        RetexModel.from_pretrained(tmp_path / "artifact")


@torch.no_grad()
def test_soft_routing_uses_the_scores():
    model, inputs = build("bert", routing="soft", temperature=0.1), tokens(4)
    output = model(**inputs)
    expected = (-output.routing.residuals / 0.1).softmax(1)
    torch.testing.assert_close(output.routing.weights, expected)


@torch.no_grad()
def test_masked_tokens_and_labels_do_not_count():
    model = build("bert")
    inputs = tokens(6)
    other = {**inputs, "input_ids": inputs["input_ids"] + (1 - inputs["attention_mask"])}
    expected = model.identify(**inputs).residuals
    torch.testing.assert_close(model.identify(**other).residuals, expected, rtol=1e-4, atol=1e-5)
    one = {name: value[2:3, : inputs["attention_mask"][2].sum()] for name, value in inputs.items()}
    torch.testing.assert_close(model.identify(**one).residuals, expected[2:3], rtol=1e-3, atol=1e-4)


def test_what_cannot_be_done_is_said_in_one_sentence():
    with pytest.raises(ConfigError, match="signatures must be one of"):
        RetexConfig(signatures="tea leaves")
    with pytest.raises(ConfigError, match=r'recovery="affine" and signatures="weights" exclude each other'):
        RetexConfig(rank=4, signatures="weights", recovery="affine")
    model = build("bert", exclude=["encoder", "pooler"])
    with pytest.raises(ConfigError, match=r"needs a recovered linear or convolution layer.*call fit_signatures"):
        model.identify(**tokens(2))
    model = build("bert")
    with pytest.raises(InputError, match="one pool of batches, not one per task"):
        model.fit_signatures({task: [tokens(2)] for task in TASKS})
    with pytest.raises(InputError, match="pool of unlabelled inputs is empty"):
        model.fit_signatures([])


def test_layers_that_a_task_leaves_alone_do_not_count():
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    merged = {n: sum(e.state_dict()[n] for e in experts.values()) / 3 for n in base.state_dict()}
    others = [experts[task].state_dict() for task in TASKS[1:]]
    for name in merged:  # so that one expert equals the merge there, up to rounding
        if name.startswith("encoder.layer.1."):
            experts["red"].state_dict()[name].copy_(sum(other[name] for other in others) / 2)
    model, _ = build_from(base, experts, rank="full", signatures="weights")
    inputs = tokens(4)
    expected = expected_residuals(model, "encoder.layer.0.", inputs)
    torch.testing.assert_close(model.identify(**inputs).residuals, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_experts_alone_are_enough_to_route_and_the_log_says_how(caplog):
    model, _ = build_retex("gpt2")
    assert model.retex_config.signatures == "auto"
    inputs = tokens(4)
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert "respond to an input, compared with synthetic inputs: give fit_signatures some inputs" in caplog.text
    for row, task in enumerate(model.identify(**inputs).tasks):
        alone = model.generate(**inputs, task=task, max_new_tokens=3, do_sample=False)
        assert generated[row].tolist() == alone[row].tolist()
    assert caplog.text.count("compared with synthetic inputs") == 1
    by_weights = model.identify(**inputs).residuals
    model.fit_signatures({task: [tokens(6)] for task in TASKS}, progress=False)
    assert isinstance(model.signatures, Signatures)
    assert not torch.allclose(model.identify(**inputs).residuals, by_weights)


def test_reference_inputs_alone_can_be_asked_for():
    for options in ({"signatures": "inputs"}, {"recovery": "affine", "rank": 3}):
        model, _ = build_retex("bert", **options)
        with pytest.raises(
            RetexError, match="no task signatures yet: call fit_signatures, or name the task with task="
        ):
            model.identify(**tokens(2))
    model, _ = build_retex("bert", routing={"method": "hard", "far": "merged"})
    with pytest.raises(RetexError, match="no task signatures yet"):
        model.identify(**tokens(2))


@torch.no_grad()
def test_a_model_that_nothing_is_known_of_is_not_centred(caplog):
    """No configuration says what a plain module takes."""
    base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    model, _ = build_from(base, make_experts(base), rank=2)
    inputs = torch.randn(5, 6)
    assert library_of(base).input_form(base) is None
    found = model.identify(inputs).residuals
    assert "respond to an input, alone" in caplog.text
    torch.testing.assert_close(found, -defined_scores(model, "", {"input": inputs}), rtol=1e-3, atol=1e-4)


def test_synthetic_tokens_are_ordinary_tokens_of_several_lengths():
    form = Tokens("input_ids", 50, longest=20, reserved=frozenset({0, 7}))
    batches = list(synthetic_batches(form))
    assert [batch["input_ids"].shape for batch in batches] == [(32, 8), (32, 16), (32, 20), (32, 20)]
    seen = torch.cat([batch["input_ids"].flatten() for batch in batches])
    assert set(seen.tolist()) == set(range(50)) - {0, 7}
    again = list(synthetic_batches(form))
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(batches, again, strict=True))


def test_synthetic_signals_have_the_spectrum_of_nature():
    batches = list(synthetic_batches(Signal("pixel_values", (3, 64, 64), smooth=2)))
    images = torch.cat([batch["pixel_values"] for batch in batches])
    assert images.shape == (128, 3, 64, 64)
    rows = images.flatten(1)
    torch.testing.assert_close(rows.mean(1), torch.zeros(128), rtol=0, atol=1e-5)
    torch.testing.assert_close(rows.std(1), torch.ones(128))
    power = torch.fft.fft2(images).abs().square().mean((0, 1))
    # Power falls with the square of the frequency: between 2 and 16 by 64.
    assert 40 < (power[2, 0] + power[0, 2]) / (power[16, 0] + power[0, 16]) < 100
