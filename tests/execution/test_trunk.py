"""A shared trunk: the layers up to the feature layer stay merged, and run once."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, ROWS, tokens
from helpers import TASKS, assert_same, leaves, make_experts
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from retex_hf import ConfigError, RetexConfig, RetexError, RetexModel

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


def fit(model, family) -> None:
    model.fit_signatures({task: [family.inputs(8)] for task in TASKS}, progress=False)


@torch.no_grad()
@pytest.mark.parametrize("execution", ["grouped", "auto"])
@pytest.mark.parametrize("name", BLOCKS)
def test_routed_rows_are_those_of_experts_with_a_merged_trunk(name, execution):
    model, experts, family = build(name)
    recovered = set(model.recovery)
    fit(model, family)
    trunk = recovered - set(model.recovery)
    assert trunk
    model.execution = execution
    inputs = family.inputs(ROWS)
    routed = model(**inputs)
    merged = model.get_base_model().state_dict()
    parts = dict(leaves(routed))
    for task in set(routed.routing.tasks):
        expert = experts[task]
        expert.load_state_dict({n: merged[n] if n in trunk else t for n, t in expert.state_dict().items()})
        rows = [row for row, name in enumerate(routed.routing.tasks) if name == task]
        for leaf, expected in leaves(expert(**inputs)):
            if expected.ndim and len(expected) == ROWS and "per_text" not in leaf:
                torch.testing.assert_close(parts[leaf][rows], expected[rows], **CLOSE)


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


def test_the_trunk_is_what_runs_before_the_features():
    model, _, family = build("bert")
    everything = set(model.recovery)
    fit(model, family)
    expected = {n for n in everything if n.startswith(("embeddings.", "encoder.layer.0."))}
    assert everything - set(model.recovery) == expected
    assert set(model.recovery_errors) == set(model.recovery)


def test_a_tied_embedding_belongs_to_the_trunk():
    model, _, family = build("t5")
    fit(model, family)
    assert "shared.weight" not in model.recovery
    assert not any(name.startswith("encoder.block.0.") for name in model.recovery)
    assert any(name.startswith("decoder.block.0.") for name in model.recovery)


def test_statistics_of_normalisation_go_with_their_weights():
    model, _, family = build("resnet")
    fit(model, family)
    assert not any(name.startswith(("embedder.", "encoder.stages.0.")) for name in model.recovery)
    assert any(name.endswith("running_mean") for name in model.recovery)


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart", "gpt2", "llama-tied"])
def test_generate_goes_on_from_the_trunk(name):
    model, _, family = build(name)
    fit(model, family)
    inputs = tokens(ROWS)
    options = {"max_new_tokens": 5, "do_sample": False, "no_repeat_ngram_size": 1}
    routed = model.generate(**inputs, **options)
    assert torch.equal(routed, model.generate(**inputs, **options, task=routed.routing.task_ids))
    assert model.retex_config.trunk["replayed"]


# Decoder-only family -> its first block, and the next one.
DECODERS = {
    "gpt2": ("transformer.h.0", "transformer.h.1"),
    "llama-tied": ("model.layers.0", "model.layers.1"),
    "sliding": ("model.layers.0", "model.layers.1"),
}
GREEDY = {"max_new_tokens": 5, "do_sample": False, "no_repeat_ngram_size": 1}


def decoder(name: str):
    if name != "sliding":
        model, _, family = build(name)
    else:  # the prompt is longer than the window
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = MistralConfig(**sizes, num_key_value_heads=1, vocab_size=40, sliding_window=5, pad_token_id=0)
        base, family = MistralForCausalLM(config).eval(), FAMILIES["llama-tied"]
        options = RetexConfig(rank="full", shared_trunk=True, feature_layer=0)
        model = RetexModel.from_experts(base, make_experts(base, scale=1.0), options, progress=False)
    fit(model, family)
    return model


def left_padded(rows: int) -> dict[str, Tensor]:
    return {name: value.flip(1) for name, value in tokens(rows).items()}


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
@pytest.mark.parametrize("make", [tokens, left_padded])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_reads_the_prompt_once(name, make, execution):
    model = decoder(name)
    assert model.retex_config.trunk["replayed"] and model.retex_config.trunk["cached"]
    model.execution = execution
    torch.manual_seed(3)
    inputs = make(ROWS)
    routed = model.generate(**inputs, **GREEDY)
    groups = len(set(routed.routing.tasks))
    assert groups > 1
    assert torch.equal(routed, model.generate(**inputs, **GREEDY, task=routed.routing.task_ids))
    if execution == "grouped" and make is left_padded:
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
    model = decoder(name)
    torch.manual_seed(3)
    inputs = left_padded(ROWS)
    routed = model.generate(**inputs, **GREEDY, **options)
    assert torch.equal(routed, model.generate(**inputs, **GREEDY, **options, task=routed.routing.task_ids))


@torch.no_grad()
def test_padding_that_generate_masks_itself():
    """The pass that identifies sees no mask, and `generate` makes one. In Bloom nothing but the mask tells: its blocks
    are called with no positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}
    base = BloomForCausalLM(BloomConfig(**sizes, pad_token_id=0, initializer_range=0.5)).eval()
    config = RetexConfig(rank="full", shared_trunk=True, feature_layer=0)
    model = RetexModel.from_experts(base, make_experts(base, scale=1.0), config, progress=False)
    fit(model, FAMILIES["gpt2"])
    assert model.retex_config.trunk["replayed"]
    model.execution = "grouped"
    torch.manual_seed(3)
    ids = left_padded(ROWS)["input_ids"]
    assert (ids == 0).any()
    asked = {"output_logits": True, "return_dict_in_generate": True}
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1, **asked}
    routed = model.generate(input_ids=ids, **options)
    named = model.generate(input_ids=ids, **options, task=routed.routing.task_ids)
    torch.testing.assert_close(routed.logits[0], named.logits[0], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_a_forward_pass_returns_a_whole_cache(name):
    model = decoder(name)
    inputs = left_padded(1)
    routed = model(**inputs)
    named = model(**inputs, task=routed.routing.tasks[0])
    assert_same(routed.logits, named.logits, **CLOSE)
    for one, other in zip(routed.past_key_values.layers, named.past_key_values.layers, strict=True):
        for part in ("keys", "values"):
            torch.testing.assert_close(getattr(one, part), getattr(other, part), **CLOSE)
        assert one.get_seq_length() == other.get_seq_length() == 8


@torch.no_grad()
def test_recurrent_decoders_run_their_trunk_twice():
    model, _, family = build("mamba")
    fit(model, family)
    assert not model.retex_config.trunk["replayed"]
    inputs = tokens(ROWS)
    routed = model.generate(**inputs, **GREEDY)
    assert torch.equal(routed, model.generate(**inputs, **GREEDY, task=routed.routing.task_ids))


@torch.no_grad()
def test_what_happens_inside_blocks_is_still_to_be_had():
    model, _, family = build("bert")
    fit(model, family)
    inputs = tokens(ROWS)
    asked = {"output_hidden_states": True, "output_attentions": True}
    routed = model(**inputs, **asked)
    assert len(routed.hidden_states) == 3
    assert_same(routed, model(**inputs, **asked, task=routed.routing.task_ids), **CLOSE)


def test_gradients_reach_the_inputs():
    model, _, family = build("bert")
    fit(model, family)
    ids = tokens(ROWS)["input_ids"]
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    output = model(inputs_embeds=embeds)
    gradient = torch.autograd.grad(output.last_hidden_state.square().sum(), embeds)[0]
    again = model(inputs_embeds=embeds, task=output.routing.task_ids)
    expected = torch.autograd.grad(again.last_hidden_state.square().sum(), embeds)[0]
    assert gradient.abs().sum() > 0
    torch.testing.assert_close(gradient, expected, **CLOSE)


@torch.no_grad()
def test_saved_and_loaded(tmp_path):
    model, _, family = build("bert-classifier")
    fit(model, family)
    model.save_pretrained(tmp_path)
    loaded = RetexModel.from_pretrained(tmp_path)
    assert loaded.retex_config.trunk == model.retex_config.trunk
    inputs = tokens(ROWS)
    assert_same(loaded(**inputs), model(**inputs), exact=True)


@torch.no_grad()
def test_an_unloaded_expert_knows_nothing_of_the_trunk():
    model, _, family = build("bert")
    fit(model, family)
    inputs = tokens(ROWS)
    routed = model(**inputs)
    expert = model.merge_and_unload(routed.routing.tasks[0])
    row = {name: value[:1] for name, value in inputs.items()}
    torch.testing.assert_close(expert(**row).last_hidden_state, routed.last_hidden_state[:1], **CLOSE)
    assert_same(dict(expert.state_dict()), model.recover(routed.routing.tasks[0]), exact=True)


def test_the_cost_is_reported(capsys):
    model, _, family = build("bert-classifier")
    model.fit_signatures({task: [family.inputs(8)] for task in TASKS})
    cost = model.retex_config.trunk["cost"]
    assert set(cost) == set(TASKS)
    assert all(c["change"] > 0 and 0 <= c["agreement"] <= 1 for c in cost.values())
    mean = sum(c["agreement"] for c in cost.values()) / 3
    assert f"{mean:.1%} of the answers stay the same" in capsys.readouterr().err


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
