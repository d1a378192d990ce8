"""Identification from the experts' own weights: the scores are what they are defined to be, and they identify."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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
from retex_hf.routing import Signatures, WeightSignatures, like, synthetic_batches
from retex_hf.routing.responses import Neutral, level, mean_input
from retex_hf.routing.synthetic import noise

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


def as_rows(module: nn.Module, hidden: Tensor) -> Tensor:
    """What a layer's weight is applied to: (rows, tokens or positions, numbers)."""
    if isinstance(module, nn.Conv2d):
        taken = module.kernel_size, module.dilation, module.padding, module.stride
        return torch.nn.functional.unfold(hidden, *taken).mT.double()
    return hidden.reshape(len(hidden), -1, hidden.shape[-1]).double()


def entering(model: RetexModel, prefix: str, inputs: dict[str, Tensor], run=None) -> dict[str, Tensor]:
    """The inputs of every recovered layer in a pass of the merged model, as rows of numbers."""
    found, base = {}, model.get_base_model()
    layers = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, (nn.Linear, Conv1D, nn.Conv2d)) and name.startswith(prefix)
        and "pooler" not in name  # it runs after the last block
        and f"{name}.weight" in model.recovery and model.recovery[f"{name}.weight"].layout.kind != "vector"
    }  # fmt: skip
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: found.update({name: as_rows(module, args[0])}))
        for name, module in layers.items()
    ]
    (run or base)(**inputs)
    for hook in hooks:
        hook.remove()
    assert found
    return found


def over_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over unmasked tokens of numbers (rows, tokens, ...)."""
    if mask is None:
        return values.mean(1)
    weights = mask.double().view(*mask.shape, *[1] * (values.ndim - 2))
    return (values * weights).sum(1) / weights.sum(1)


def acting(model: RetexModel, task: str, name: str) -> Tensor:
    """The update of a layer's weight as the matrix that it applies to inputs."""
    base = model.get_base_model()
    update = (model.recover(task)[f"{name}.weight"] - base.state_dict()[f"{name}.weight"]).flatten(1).double()
    return update.T if isinstance(base.get_submodule(name), Conv1D) else update


@torch.no_grad()
def defined_scores(model: RetexModel, prefix: str, neutral: list[dict], inputs: dict[str, Tensor], run=None) -> Tensor:
    """The definition, layer by layer, with inverse square roots and singular values of whole matrices; `neutral` are
    batches of inputs of no task."""
    before = [entering(model, prefix, batch, run) for batch in neutral]
    scores = []
    for name, hidden in entering(model, prefix, inputs, run).items():
        mean, whitening = 0.0, torch.eye(hidden.shape[-1], dtype=torch.float64)
        if neutral:
            pooled = torch.cat([batch[name].mean(1) for batch in before])
            mean, covariance = pooled.mean(0), pooled.T.cov()
            values, vectors = torch.linalg.eigh(covariance)
            whitening = vectors / (values.clamp(min=0) + values.mean()).sqrt() @ vectors.T
        columns = []
        for task in TASKS:
            _, values, right = torch.linalg.svd(acting(model, task, name) @ whitening, full_matrices=False)
            values = torch.where(values > 1e-3 * values[0], values, 0) ** 0.2
            response = (hidden - mean) @ right.T * values / values.norm()
            columns.append(over_tokens(response.square().sum(-1), inputs.get("attention_mask")).log())
        scores.append(torch.stack(columns, 1))
    return torch.stack(scores).mean(0).float()


@torch.no_grad()
def expected_residuals(model: RetexModel, prefix: str, inputs: dict[str, Tensor], run=None) -> Tensor:
    """How much less than to synthetic inputs the updates respond to these."""
    base = model.get_base_model()
    batches = list(synthetic_batches(like(library_of(base).input_form(base), inputs)))
    centre = torch.cat([defined_scores(model, prefix, batches, batch, run) for batch in batches]).mean(0)
    return centre - defined_scores(model, prefix, batches, inputs, run)


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
    torch.testing.assert_close(found, -defined_scores(model, "", [], {"input": inputs}), rtol=1e-3, atol=1e-4)


def test_synthetic_tokens_are_ordinary_tokens_of_several_lengths():
    form = Tokens("input_ids", 50, longest=20, reserved=frozenset({0, 7}))
    batches = list(synthetic_batches(form))
    assert [batch["input_ids"].shape for batch in batches] == [(64, 8), (64, 16), (64, 20), (64, 20)]
    seen = torch.cat([batch["input_ids"].flatten() for batch in batches])
    assert set(seen.tolist()) == set(range(50)) - {0, 7}
    again = list(synthetic_batches(form))
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(batches, again, strict=True))


def test_synthetic_tokens_are_as_common_as_in_a_text():
    batches = synthetic_batches(Tokens("input_ids", 10_000))
    seen = torch.cat([batch["input_ids"].flatten() for batch in batches])
    # Of 1 / (rank + 100), the first 1000 of 10000 ranks have log(11) / log(101).
    assert (seen < 1000).float().mean() == pytest.approx(0.52, abs=0.02)


@torch.no_grad()
def test_a_pool_of_images_of_one_size_serves_images_of_another():
    """A pool is compared with synthetic images of its own size, and so is every call."""
    model = build("resnet")
    small, large = (torch.randn(6, 3, side, side, generator=torch.Generator().manual_seed(side)) for side in (32, 64))
    plain = {side: model.identify(pixel_values=pixels).residuals for side, pixels in ((32, small), (64, large))}
    model.fit_signatures([{"pixel_values": small}])
    lead = -plain[32].mean(0)
    torch.testing.assert_close(model.signatures.lead, lead, rtol=1e-4, atol=1e-4)
    for side, pixels in ((32, small), (64, large)):
        torch.testing.assert_close(
            model.identify(pixel_values=pixels).residuals, plain[side] + lead, rtol=1e-4, atol=1e-4
        )
    whole = -torch.cat([plain[32], plain[64]]).mean(0)
    for order in ((small, large), (large, small)):
        model.fit_signatures([{"pixel_values": pixels} for pixels in order])
        torch.testing.assert_close(model.signatures.lead, whole, rtol=1e-4, atol=1e-4)


def images(size: int = 64) -> list[Tensor]:
    """Textures, many shapes, few shapes and strokes."""
    return [batch["pixel_values"] for batch in synthetic_batches(Signal("pixel_values", (3, size, size), smooth=2))]


def test_synthetic_images_are_as_varied_as_data_are():
    kinds = images()
    assert [kind.shape for kind in kinds] == [(64, 3, 64, 64)] * 4
    found = torch.cat(kinds)
    assert found.isfinite().all() and found.min() > -2.2 and found.max() < 2.7
    grey = (found.amax(1) - found.amin(1)).amax((1, 2)) < 1e-4
    assert 0.3 < grey.float().mean() < 0.7
    brightness, contrast = found.mean((1, 2, 3)), found.std((1, 2, 3))
    assert brightness.std() > 0.7
    assert contrast.min() < 0.4 and contrast.max() > 1.1
    # Strokes leave much of the ground empty; textures leave none.
    flat = [(kind.diff(dim=-1).abs() < 0.01).float().mean() for kind in kinds]
    assert flat[3] > 0.4 > 0.2 > flat[0]
    assert all(torch.equal(one, other) for one, other in zip(kinds, images(), strict=True))


@pytest.mark.parametrize(("shape", "smooth"), [((1600,), 1), ((80, 300), 2), ((4, 3, 32, 32), 2), ((1, 28, 20), 2)])
def test_synthetic_signals_of_every_form(shape, smooth):
    """A wave, a spectrogram, a film and a small grey image."""
    for batch in synthetic_batches(Signal("x", shape, smooth), dtype=torch.bfloat16):
        assert batch["x"].shape == (64, *shape) and batch["x"].dtype == torch.bfloat16
        assert batch["x"].isfinite().all()
        assert (batch["x"].float().flatten(1).std(1) > 0.1).float().mean() > 0.9  # a few scenes are empty


def test_synthetic_noise_is_rough_or_smooth():
    found = noise((256, 1, 64, 64), 2, torch.Generator().manual_seed(0))
    rows = found.flatten(1)
    torch.testing.assert_close(rows.mean(1), torch.zeros(256), rtol=0, atol=1e-5)
    torch.testing.assert_close(rows.std(1), torch.ones(256))
    power = torch.fft.fft2(found).abs().square().mean(1)
    near, far = power[:, 2, 0] + power[:, 0, 2], power[:, 16, 0] + power[:, 0, 16]
    slope = (near / far).log() / torch.tensor(64.0).log()  # power falls with twice the exponent, 0.5 to 2
    assert slope.mean() == pytest.approx(1.25, abs=0.15)
    assert slope.quantile(0.1) < 0.8 and slope.quantile(0.9) > 1.7


def test_images_are_compared_with_images_of_their_size():
    form = Signal("pixel_values", (3, 224, 224), smooth=2)
    assert like(form, {"pixel_values": torch.zeros(2, 3, 64, 48)}).shape == (3, 64, 48)
    assert like(form, {"pixel_values": torch.zeros(2, 4, 3, 64, 48)}) is form  # of another kind
    assert like(form, {"inputs_embeds": torch.zeros(2, 5, 8)}) is form
    wave = Signal("input_values", (16000,), smooth=1)
    assert like(wave, {"input_values": torch.zeros(2, 500)}) is wave


def test_whitening_makes_neutral_inputs_vary_equally():
    mixing = torch.diag(torch.tensor([10.0, 1.0, 0.1])) @ torch.linalg.qr(torch.randn(3, 3)).Q
    rows = torch.randn(4000, 3) @ mixing + 5
    neutral = Neutral.fit(rows)
    torch.testing.assert_close(neutral.mean, rows.mean(0))
    found = torch.linalg.eigvalsh(neutral.whiten(rows).T.cov()).flip(0)
    # e / (e + c), with c the mean of 100, 1 and 0.01.
    expected = torch.tensor([e / (e + 101.01 / 3) for e in (100.0, 1.0, 0.01)])
    torch.testing.assert_close(found / found[0], expected / expected[0], rtol=0.1, atol=1e-4)
    few = Neutral.fit(torch.ones(5, 3))  # inputs that do not vary
    assert torch.equal(few.whiten(rows), rows)


def test_singular_values_are_levelled():
    matrix = torch.randn(6, 9)
    _, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = level(matrix)
    assert found.norm() == pytest.approx(1, abs=1e-5)
    _, levelled, same = torch.linalg.svd(found, full_matrices=False)
    torch.testing.assert_close(levelled / levelled[0], (values / values[0]) ** 0.2)
    torch.testing.assert_close((same * right).sum(1).abs(), torch.ones(6), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"padding": "same", "dilation": 2}, {"stride": 2, "padding": (0, 2)}]
)
def test_the_mean_patch_is_the_mean_of_all_patches(options):
    layer = nn.Conv2d(3, 5, (3, 2), bias=False, **options)
    hidden = torch.randn(4, 3, 9, 10)
    expected = layer(hidden).mean((2, 3))
    torch.testing.assert_close(mean_input(layer, hidden, None) @ layer.weight.flatten(1).T, expected)


def test_the_mean_input_is_that_of_unmasked_tokens():
    hidden, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    found = mean_input(nn.Linear(4, 4), hidden, mask)
    torch.testing.assert_close(found, torch.stack([hidden[0, :2].mean(0), hidden[1, 0]]))


@torch.no_grad()
def test_threads_share_one_calibration():
    model, batches = build("bert"), [tokens(rows) for rows in (2, 3, 4, 5)]
    expected = [model.identify(**batch).residuals for batch in batches]
    model.expert_cache.clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: model.identify(**batch).residuals, batches))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_added_and_deleted_tasks_are_scored():
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    model, _ = build_from(base, experts, rank="full", signatures="weights")
    inputs = tokens(5)
    before = model.identify(**inputs).residuals
    model.add_task("blue-green", perturb(base, 9), progress=False)
    joined = model.identify(**inputs).residuals
    assert joined.shape == (5, 4) and joined[:, 3].isfinite().all()
    torch.testing.assert_close(joined[:, :3], before, rtol=1e-3, atol=1e-3)
    model.delete_task("blue-green")
    torch.testing.assert_close(model.identify(**inputs).residuals, before, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_what_came_before_changes_no_scores():
    """Images of another size are compared with images of their own size."""
    model = build("resnet")
    small, large = torch.randn(3, 3, 32, 32), torch.randn(3, 3, 48, 48)
    expected = model.identify(pixel_values=large).residuals
    model.expert_cache.clear()
    model.identify(pixel_values=small)
    assert_same(model.identify(pixel_values=large).residuals, expected, exact=True)


@torch.no_grad()
def test_a_pool_is_fitted_without_a_warning_that_there_is_none(caplog):
    model = build("bert")
    model.fit_signatures(tokens(9))
    model.identify(**tokens(4))
    assert "Tasks are identified by how their weights" not in caplog.text
