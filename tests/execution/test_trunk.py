"""A shared trunk: rows whose task is identified begin on the merged model, once for all, and are aligned with their
expert where it takes over."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from families import FAMILIES, ROWS, tokens
from helpers import TASKS, assert_same, leaves, make_experts
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from retex_hf import ConfigError, RetexConfig, RetexError, RetexModel
from retex_hf.model import trunk_references
from retex_hf.model.shared_trunk import changed_answers, mean_cost, misses, simplest_good
from retex_hf.model.trunk_references import TaskReferences

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# Family -> a leaf module of the first block, and one of the second.
BLOCKS = {
    "bert": ("encoder.layer.0.output.dense", "encoder.layer.1.output.dense"),
    "bert-classifier": ("bert.encoder.layer.0.output.dense", "bert.encoder.layer.1.output.dense"),
    "vit": ("layers.0.mlp.fc2", "layers.1.mlp.fc2"),
    "resnet": ("encoder.stages.0.layers.0.layer.0.convolution", "encoder.stages.1.layers.0.layer.0.convolution"),
    "t5": ("encoder.block.0.layer.1.DenseReluDense.wo", "encoder.block.1.layer.1.DenseReluDense.wo"),
    "open_clip-vit": ("visual.transformer.resblocks.0.mlp.c_fc", "visual.transformer.resblocks.1.mlp.c_fc"),
}


def build(name: str, **options):
    torch.manual_seed(0)
    family = FAMILIES[name]
    base = family.make().eval()
    experts = make_experts(base, scale=1.0)
    config = RetexConfig(rank="full", shared_trunk=True, feature_layer=0, **options)
    model = RetexModel.from_experts(base, experts, config, model_config=family.model_config, progress=False)
    return model, experts, family


def fit(model, family, rows: int = 8) -> None:
    model.fit_signatures({task: [family.inputs(rows)] for task in TASKS}, progress=False)


def behind_trunk(model: RetexModel, expert: nn.Module, task: str) -> nn.Module:
    """The expert with the merged trunk and a hook at its end that aligns, computed in another way than the library."""
    trunk, alignment, number = model.retex_config.trunk, model.signatures.alignment, model.tasks.index(task)
    merged, expert = model.get_base_model().state_dict(), deepcopy(expert)
    own = {n: merged[n] if n in trunk["parameters"] else t for n, t in expert.state_dict().items()}
    expert.load_state_dict(own)
    down = alignment.down[number]
    taps = down.flatten(2).unbind(2) if down.ndim == 4 else [down]  # one for each position around

    def around(hidden: Tensor, tap: int) -> Tensor:
        if len(taps) == 1:
            return hidden
        for axis, step in ((1, tap // 3 - 1), (2, tap % 3 - 1)):
            places = (torch.arange(hidden.shape[axis]) + step).clamp(0, hidden.shape[axis] - 1)
            hidden = hidden.index_select(axis, places)
        return hidden

    def align(module, args, output):
        hidden = (output if isinstance(output, Tensor) else output[0]).movedim(trunk["axis"], -1)
        mappings = [(one.T @ alignment.up[number]).to(hidden.dtype) for one in taps]
        found = hidden + sum(around(hidden, tap) @ mapping for tap, mapping in enumerate(mappings))
        found = (found + alignment.shift[number]).movedim(-1, trunk["axis"])
        return found if isinstance(output, Tensor) else type(output)((found, *output[1:]))

    expert.get_submodule(trunk["junction"]).register_forward_hook(align)
    return expert.eval()


def rows_of(routed, task: str) -> list[int]:
    return [row for row, name in enumerate(routed.routing.tasks) if name == task]


@torch.no_grad()
@pytest.mark.parametrize("execution", ["grouped", "auto"])
@pytest.mark.parametrize("name", BLOCKS)
def test_routed_rows_are_those_of_experts_behind_the_trunk(name, execution):
    model, experts, family = build(name)
    fit(model, family)
    model.execution = execution
    inputs = family.inputs(ROWS)
    routed = model(**inputs)
    parts = dict(leaves(routed))
    for task in set(routed.routing.tasks):
        rows = rows_of(routed, task)
        for leaf, expected in leaves(behind_trunk(model, experts[task], task)(**inputs)):
            if expected.ndim and len(expected) == ROWS and "per_text" not in leaf:
                torch.testing.assert_close(parts[leaf][rows], expected[rows], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_a_named_task_runs_on_the_whole_expert(name):
    model, experts, family = build(name)
    recovered = set(model.recovery)
    fit(model, family)
    assert set(model.recovery) == recovered
    inputs = family.inputs(ROWS)
    assert_same(model(**inputs, task="red"), experts["red"](**inputs), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_mixtures_and_rows_of_no_task_are_aligned_in_proportion(name):
    """Soft routing mixes corrections by the weights of experts; a row of the merged model gets none."""
    model, _, family = build(name)
    fit(model, family)
    inputs = family.inputs(ROWS)
    outputs = {}
    for execution in ("grouped", "mixed"):
        model.execution, model.routing = execution, "soft"
        outputs[execution] = model(**inputs)
    assert_same(outputs["grouped"], outputs["mixed"], rtol=1e-3, atol=1e-4)
    model.routing = {"method": "hard", "far": "merged", "quantile": 0.01, "slack": 1e-9}
    routed = model(**inputs)
    assert routed.routing.abstained.all()
    with model.disable_adapter():
        assert_same(routed, model(**inputs), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_the_trunk_runs_once_and_the_rest_per_expert(name):
    model, _, family = build(name)
    fit(model, family)
    model.execution = "grouped"
    model(**family.inputs(ROWS))  # the first call of a kind also finds out how its rows are taken apart
    calls = {leaf: 0 for leaf in BLOCKS[name]}
    for leaf in calls:

        def count(*_, leaf=leaf):
            calls[leaf] += 1

        model.get_base_model().get_submodule(leaf).register_forward_hook(count)
    model.expert_cache.clear()  # hooks act on experts that are recovered afterwards
    groups = len(set(model(**family.inputs(ROWS)).routing.tasks))
    first, second = BLOCKS[name]
    assert calls == {first: 1, second: groups}
    # A named task has nothing to go on from.
    model(**family.inputs(ROWS), task="red")
    assert calls == {first: 2, second: groups + 1}


def trunk_of(name: str) -> set[str]:
    model, _, family = build(name)
    fit(model, family)
    return set(model.retex_config.trunk["parameters"])


def test_the_trunk_is_what_runs_before_the_features():
    everything = {name for name, _ in FAMILIES["bert"].make().named_parameters()}
    assert trunk_of("bert") == {n for n in everything if n.startswith(("embeddings.", "encoder.layer.0."))}


def test_a_tied_embedding_belongs_to_the_trunk():
    trunk = trunk_of("t5")
    assert {"shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"} <= trunk
    assert not any(name.startswith("decoder.block.0.") for name in trunk)


def test_statistics_of_normalisation_go_with_their_weights():
    trunk = trunk_of("resnet")
    assert all(name.startswith(("embedder.", "encoder.stages.0.")) for name in trunk)
    assert any(name.endswith("running_mean") for name in trunk)


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart", "gpt2", "llama-tied"])
def test_generate_goes_on_from_the_trunk(name):
    model, experts, family = build(name)
    fit(model, family)
    assert_generates(model, experts, tokens(ROWS))
    assert model.retex_config.trunk["replayed"]


GREEDY = {"max_new_tokens": 5, "do_sample": False, "no_repeat_ngram_size": 1}


def assert_generates(model, experts, inputs, **options) -> Tensor:
    """Routed rows are what the experts behind the trunk generate, in `generate` of their own."""
    options = GREEDY | options
    torch.manual_seed(3)
    routed = model.generate(**inputs, **options)
    per_row = len(routed) // len(inputs["input_ids"])
    for task in set(routed.routing.tasks):
        rows = rows_of(routed, task)
        part = {name: value[rows] for name, value in inputs.items()}
        expected = behind_trunk(model, experts[task], task).generate(**part, **options)
        found = routed.unflatten(0, (-1, per_row))[rows].flatten(0, 1)
        assert torch.equal(found[:, : expected.shape[1]], expected)
    return routed


# Decoder-only family -> its first block, and the next one.
DECODERS = {
    "gpt2": ("transformer.h.0", "transformer.h.1"),
    "llama-tied": ("model.layers.0", "model.layers.1"),
    "sliding": ("model.layers.0", "model.layers.1"),
}


def decoder(name: str):
    if name != "sliding":
        model, experts, family = build(name)
    else:  # the prompt is longer than the window
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = MistralConfig(**sizes, num_key_value_heads=1, vocab_size=40, sliding_window=5, pad_token_id=0)
        base, family = MistralForCausalLM(config).eval(), FAMILIES["llama-tied"]
        options, experts = RetexConfig(rank="full", shared_trunk=True, feature_layer=0), make_experts(base, scale=1.0)
        model = RetexModel.from_experts(base, experts, options, progress=False)
    fit(model, family)
    return model, experts


@torch.no_grad()
def test_assisted_generation_behind_a_trunk_takes_back_tokens_beyond_the_window():
    model, _ = decoder("sliding")
    ids = torch.arange(5, 17)[None]  # of a prompt that repeats nothing, what was looked up is taken back
    inputs, options = (
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        {"max_new_tokens": 8, "do_sample": False},
    )
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, prompt_lookup_num_tokens=2), expected)


def left_padded(rows: int) -> dict[str, Tensor]:
    return {name: value.flip(1) for name, value in tokens(rows).items()}


def unpadded(rows: int) -> dict[str, Tensor]:
    """Rows without padding, for which `generate` counts positions row by row, and a forward pass once for all."""
    ids = tokens(rows)["input_ids"].clamp(min=3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def lengths_seen(model: RetexModel, blocks: tuple[str, ...]) -> dict[str, list[int]]:
    """How many positions each of these blocks is called with, from now on."""
    seen: dict[str, list[int]] = {block: [] for block in blocks}
    for block, lengths in seen.items():
        # The norm at the start of a block runs only if the block does.
        norm = next(
            m for n, m in model.get_base_model().get_submodule(block).named_modules() if "norm" in n or "ln_" in n
        )
        norm.register_forward_hook(lambda module, args, output, lengths=lengths: lengths.append(output.shape[1]))
    model.expert_cache.clear()  # hooks act on experts that are recovered afterwards
    return seen


@torch.no_grad()
@pytest.mark.parametrize("execution", ["grouped", "auto"])
@pytest.mark.parametrize("make", [tokens, left_padded, unpadded])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_reads_the_prompt_once(name, make, execution):
    model, experts = decoder(name)
    assert model.retex_config.trunk["replayed"] and model.retex_config.trunk["cached"]
    model.execution = execution
    torch.manual_seed(4)
    inputs = make(ROWS)
    routed = assert_generates(model, experts, inputs)
    groups = len(set(routed.routing.tasks))
    assert groups > 1
    if execution == "grouped" and make is not tokens:
        seen = lengths_seen(model, DECODERS[name])
        assert torch.equal(model.generate(**inputs, **GREEDY), routed)
        first, second = seen.values()
        assert [length for length in first if length > 1] == [8]  # once, for all rows
        assert [length for length in second if length > 1] == [8] * groups
        assert len(second) == groups * GREEDY["max_new_tokens"]


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"num_beams": 2},
        {"num_return_sequences": 2, "num_beams": 2},
        {"cache_implementation": "static"},
    ],
    ids=["no cache", "beams", "several sequences", "static cache"],
)
def test_other_ways_to_generate_run_the_trunk_again(name, options):
    model, experts = decoder(name)
    torch.manual_seed(3)
    assert_generates(model, experts, left_padded(ROWS), **options)
    assert_generates(model, experts, unpadded(1), **options)


@torch.no_grad()
def test_padding_that_generate_masks_itself():
    """The pass that identifies sees no mask, and `generate` makes one. In Bloom nothing but the mask tells: its blocks
    are called with no positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}
    base = BloomForCausalLM(BloomConfig(**sizes, pad_token_id=0, initializer_range=0.5)).eval()
    config = RetexConfig(rank="full", shared_trunk=True, feature_layer=0)
    experts = make_experts(base, scale=1.0)
    model = RetexModel.from_experts(base, experts, config, progress=False)
    fit(model, FAMILIES["gpt2"])
    assert model.retex_config.trunk["replayed"]
    model.execution = "grouped"
    torch.manual_seed(3)
    ids = left_padded(ROWS)["input_ids"]
    assert (ids == 0).any()
    asked = {"output_logits": True, "return_dict_in_generate": True}
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1, **asked}
    routed = model.generate(input_ids=ids, **options)
    for task in set(routed.routing.tasks):
        rows = rows_of(routed, task)
        expected = behind_trunk(model, experts[task], task).generate(input_ids=ids[rows], **options)
        torch.testing.assert_close(routed.logits[0][rows], expected.logits[0], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_a_forward_pass_returns_a_whole_cache(name):
    model, experts = decoder(name)
    inputs = left_padded(1)
    routed = model(**inputs)
    task = routed.routing.tasks[0]
    expected = behind_trunk(model, experts[task], task)(**inputs)
    assert_same(routed.logits, expected.logits, **CLOSE)
    for one, other in zip(routed.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for part in ("keys", "values"):
            torch.testing.assert_close(getattr(one, part), getattr(other, part), **CLOSE)
        assert one.get_seq_length() == other.get_seq_length() == 8


@torch.no_grad()
def test_recurrent_decoders_run_their_trunk_twice():
    model, experts, family = build("mamba")
    fit(model, family)
    assert not model.retex_config.trunk["replayed"]
    assert_generates(model, experts, tokens(ROWS))


@torch.no_grad()
def test_what_happens_inside_blocks_is_still_to_be_had():
    model, experts, family = build("bert")
    fit(model, family)
    inputs = tokens(ROWS)
    asked = {"output_hidden_states": True, "output_attentions": True}
    routed = model(**inputs, **asked)
    assert len(routed.hidden_states) == 3
    for task in set(routed.routing.tasks):
        rows = rows_of(routed, task)
        expected = behind_trunk(model, experts[task], task)(**{n: v[rows] for n, v in inputs.items()}, **asked)
        for found, wanted in zip(routed.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(found[rows], wanted, **CLOSE)
        torch.testing.assert_close(routed.hidden_states[-1][rows], expected.hidden_states[-1], **CLOSE)


def test_gradients_reach_the_inputs():
    model, experts, family = build("bert")
    fit(model, family)
    model.double()  # sums of squares round by more than the bound in single precision
    ids = tokens(ROWS)["input_ids"]
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    output = model(inputs_embeds=embeds)
    gradient = torch.autograd.grad(output.last_hidden_state.square().sum(), embeds)[0]
    assert gradient.abs().sum() > 0
    for task in set(output.routing.tasks):
        rows = rows_of(output, task)
        again = behind_trunk(model, experts[task].double(), task)(inputs_embeds=embeds[rows])
        expected = torch.autograd.grad(again.last_hidden_state.square().sum(), embeds)[0]
        torch.testing.assert_close(gradient[rows], expected[rows], **CLOSE)


def test_gradients_reach_merged_parameters_of_the_trunk():
    model, experts, family = build("bert")
    fit(model, family)
    table = model.get_base_model().get_input_embeddings().weight.requires_grad_()
    inputs = tokens(ROWS)
    output = model(**inputs)
    output.last_hidden_state.square().sum().backward()
    expected = torch.zeros_like(table)
    for task in set(output.routing.tasks):
        rows = rows_of(output, task)
        again = behind_trunk(model, experts[task], task).train(False)
        own = again.get_input_embeddings().weight.requires_grad_()
        again(**{name: value[rows] for name, value in inputs.items()}).last_hidden_state.square().sum().backward()
        expected += own.grad
    torch.testing.assert_close(table.grad, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert-classifier", "resnet"])
def test_saved_and_loaded(name, tmp_path):
    model, _, family = build(name)
    fit(model, family)
    model.save_pretrained(tmp_path)
    loaded = RetexModel.from_pretrained(tmp_path)
    assert loaded.retex_config.trunk == model.retex_config.trunk
    assert torch.equal(loaded.signatures.alignment.down, model.signatures.alignment.down)
    inputs = family.inputs(ROWS)
    assert_same(loaded(**inputs), model(**inputs), exact=True)


@torch.no_grad()
def test_an_unloaded_expert_knows_nothing_of_the_trunk():
    model, _, family = build("bert")
    fit(model, family)
    inputs = tokens(ROWS)
    routed = model(**inputs)
    task = routed.routing.tasks[0]
    expert = model.merge_and_unload(task)
    named = model(**inputs, task=task)
    torch.testing.assert_close(expert(**inputs).last_hidden_state, named.last_hidden_state, **CLOSE)
    assert_same(dict(expert.state_dict()), model.recover(task), exact=True)


def test_the_cost_is_reported(capsys):
    model, _, family = build("bert-classifier")
    model.fit_signatures({task: [family.inputs(8)] for task in TASKS})
    cost = model.retex_config.trunk["cost"]
    assert set(cost) == set(TASKS)
    assert all(c["change"] > 0 and 0 <= c["agreement"] <= 1 for c in cost.values())
    mean = sum(c["agreement"] for c in cost.values()) / 3
    assert f"{mean:.1%} of the answers stay the same" in capsys.readouterr().err


@torch.no_grad()
def test_the_cost_is_that_of_rows_the_alignment_has_not_seen():
    """With as many features as positions, the alignment fits the references themselves exactly."""
    model, experts, family = build("bert-classifier")
    references = {task: [family.inputs(8)] for task in TASKS}
    model.fit_signatures(references, progress=False)
    for task, cost in model.retex_config.trunk["cost"].items():
        inputs = {n: v for n, v in references[task][0].items() if n != "labels"}
        whole, merged = experts[task](**inputs).logits, None
        behind = behind_trunk(model, experts[task], task)(**inputs).logits
        with model.disable_adapter():
            merged = model(**inputs, task=task).logits
        seen = (behind - whole).norm() / (merged - whole).norm()
        corrected = model.signatures.alignment.up[model.tasks.index(task)].any()
        assert cost["change"] > seen if corrected else cost["change"] == pytest.approx(seen.item(), rel=1e-4)
    assert model.signatures.alignment.up.flatten(1).any(1).sum() >= 2


def test_a_perturbed_row_is_in_the_fold_of_the_row():
    """Else what is measured on a row would have been fitted to it."""
    model, _, family = build("vit")
    fit(model, family)
    batches = [family.inputs(3), family.inputs(4)]
    pixels = torch.cat([batch["pixel_values"] for batch in batches])
    references = TaskReferences(model.parts(), "red", batches)
    assert references.folds == 4
    for copy in range(3):
        seen = []
        for part in references.split(copy):
            near = torch.cdist(part.inputs["pixel_values"].flatten(1), pixels.flatten(1)).argmin(1)
            assert (near % 4 == part.fold).all() and len(near) == part.rows
            seen += near.tolist()
        assert sorted(seen) == list(range(7))


def test_references_are_perturbed_where_positions_are_few(monkeypatch):
    model, _, family = build("vit")
    fit(model, family)
    references = TaskReferences(model.parts(), "red", [family.inputs(8)])
    counts = []
    for enough in (1e-9, 1e9):
        monkeypatch.setattr(trunk_references, "ENOUGH", enough)
        counts.append(sum(moments.count for moments in references.moments("layers.0")))
    assert counts[0] > 0 and counts[1] == (1 + trunk_references.COPIES) * counts[0]


def test_what_is_lost_is_what_the_expert_believes_in():
    """Of two answers that changed, one was as good as a draw, by the expert's own probabilities."""
    expected = torch.tensor([[0.51, 0.49], [0.9, 0.1], [0.3, 0.7]]).log()
    found = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    changed = changed_answers([expected[:2], expected[2:]], [found[:2], found[2:]])
    assert changed["agreement"] == pytest.approx(1 / 3)
    assert changed["lost"] == pytest.approx((0.02 + 0.8) / 3)


def test_a_weaker_restraint_has_to_be_better_by_more_than_chance():
    generator = torch.Generator().manual_seed(0)
    hard, chance = torch.rand(100, generator=generator), torch.randn(100, generator=generator)
    chance = (chance - chance.mean()) / chance.std(correction=0)  # with a standard error of 0.1
    assert simplest_good([hard + 1, hard + chance + 0.09, hard]) == 1
    assert simplest_good([hard + 1, hard + chance + 0.11, hard]) == 2
    assert simplest_good([hard, hard, hard]) == 0


@torch.no_grad()
def test_outputs_are_compared_by_answers_or_else_by_distance():
    one, other = torch.randn(4, 3), torch.randn(4, 3)
    assert misses([one], [one + 2], chooses=True).abs().max() < 1e-6  # the same probabilities
    assert torch.allclose(misses([one], [one + 2], chooses=False), torch.full((4,), 12.0))
    likely = one.softmax(-1)
    expected = (likely * (likely / other.softmax(-1)).log()).sum(-1)
    torch.testing.assert_close(misses([one], [other], chooses=True), expected)


def with_late_changes(references: int = 16, **options) -> RetexModel:
    """A model of experts that differ in their second block, and next to nothing before."""
    torch.manual_seed(0)
    family = FAMILIES["vit"]
    base = family.make().eval()
    experts = make_experts(base, scale=1.0)
    for expert in experts.values():
        for name, tensor in expert.state_dict().items():
            if "layers.1." not in name:
                tensor.copy_(torch.lerp(base.state_dict()[name], tensor, 0.01))
    config = RetexConfig(rank="full", **{"shared_trunk": "auto", "feature_layer": -1, **options})
    model = RetexModel.from_experts(base, experts, config, progress=False)
    fit(model, family, references)
    return model


def test_auto_takes_the_deepest_trunk_within_the_tolerance():
    first, second = (
        mean_cost(with_late_changes(shared_trunk=True, feature_layer=layer).retex_config.trunk["cost"])
        for layer in (0, 1)
    )
    assert first < second / 2
    for tolerance, junction in ((2 * second, "layers.1"), (2 * first, "layers.0")):
        assert with_late_changes(trunk_tolerance=tolerance).retex_config.trunk["junction"] == junction
    model = with_late_changes(trunk_tolerance=first / 2)
    assert model.retex_config.trunk is None and model.signatures.alignment is None


def test_auto_takes_no_trunk_on_the_word_of_a_few_references(capsys):
    model = with_late_changes(references=15, trunk_tolerance=1.0)
    assert model.retex_config.trunk is None and model.signatures.alignment is None
    references = {task: [FAMILIES["vit"].inputs(15 if task == "green" else 16)] for task in TASKS}
    model.fit_signatures(references)
    assert "task 'green' has 15 references" in capsys.readouterr().err
    assert with_late_changes(references=16, trunk_tolerance=1.0).retex_config.trunk is not None


@torch.no_grad()
def test_a_trunk_may_end_before_the_feature_layer():
    """Then the layers between them run for identification, and again in the experts."""
    model = with_late_changes(trunk_tolerance=0.02)
    assert model.retex_config.trunk["junction"] == "layers.0"
    assert model.signatures.feature_layer == "layers.1"
    inputs = FAMILIES["vit"].inputs(ROWS)
    outputs = {}
    for model.execution in ("grouped", "mixed"):
        outputs[model.execution] = model(**inputs)
    assert_same(outputs["grouped"], outputs["mixed"], rtol=1e-3, atol=1e-4)
    routed = outputs["grouped"]
    for task in set(routed.routing.tasks):
        rows = rows_of(routed, task)
        expected = behind_trunk(model, model.merge_and_unload(task), task)(**inputs).last_hidden_state
        torch.testing.assert_close(routed.last_hidden_state[rows], expected[rows], **CLOSE)


@torch.no_grad()
def test_a_trunk_that_fine_tuning_left_alone_costs_nothing():
    torch.manual_seed(0)
    family = FAMILIES["bert"]
    base = family.make().eval()
    experts = make_experts(base, scale=1.0)
    for expert in experts.values():
        state = expert.state_dict()
        for name, tensor in base.state_dict().items():
            if name.startswith(("embeddings.", "encoder.layer.0.")):
                state[name].copy_(tensor)
    config = RetexConfig(rank="full", shared_trunk=True, feature_layer=0)
    model = RetexModel.from_experts(base, experts, config, progress=False)
    fit(model, family)
    assert all(cost["change"] < 1e-5 for cost in model.retex_config.trunk["cost"].values())


@pytest.mark.parametrize("options", [{"signatures": "weights"}, {"feature_source": "pretrained"}])
def test_a_trunk_needs_features_of_its_own(options):
    with pytest.raises(ConfigError, match="shared_trunk"):
        RetexConfig(shared_trunk=True, **options)


class Classes(nn.Module):
    """A model that gives only the class of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).argmax(-1)


def test_a_model_without_floating_point_outputs_is_refused():
    torch.manual_seed(0)
    base = Classes().eval()
    config = RetexConfig(rank="full", shared_trunk=True, feature_layer=0)
    model = RetexModel.from_experts(base, make_experts(base, scale=1.0), config, progress=False)
    with pytest.raises(RetexError, match="gives a Tensor without floating-point numbers"):
        model.fit_signatures({task: [{"x": torch.randn(8, 8)}] for task in TASKS}, progress=False)
