"""Putting the outputs of groups back in row order, field by field."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import GenerateBeamDecoderOnlyOutput
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    SequenceClassifierOutput,
)
from transformers.models.clip.modeling_clip import CLIPOutput

from retex_hf import InputError
from retex_hf.execution import Joiner
from retex_hf.rows import Along, AlongItems, Entries, Owned, Proof, Shared, prove

INF = float("inf")
# Rows 2 and 0 went to one expert, row 1 to another: the order within a group is free.
GROUPS = [torch.tensor([2, 0]), torch.tensor([1])]
TEXTS = Proof(
    "rows",
    {
        "text_embeds": Shared(2), "image_embeds": Along(0, 1), "logits_per_image": Along(0, 1),
        "logits_per_text": Along(1, 1),
    },
    {"odd": "depends on all rows of a batch"},
)  # fmt: skip


def joiner(**options) -> Joiner:
    return Joiner(**{"rows": 3, "groups": GROUPS, "loss_weights": [2.0, 1.0], **options})


def column(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def test_rows_go_back_to_their_places():
    assert joiner().join([column(2.0, 0.0), column(1.0)], "logits").tolist() == [[0.0], [1.0], [2.0]]


def test_several_entries_per_row_stay_together_and_in_order():
    parts = [column(20, 21, 0, 1), column(10, 11)]
    assert joiner().join(parts, "sequences").flatten().tolist() == [0, 1, 10, 11, 20, 21]


def test_flattened_router_logits_are_entries_per_row():
    per_layer = [torch.arange(2 * 5 * 4.0).view(10, 4), 100 + torch.arange(5 * 4.0).view(5, 4)]
    output = joiner().join([MoeCausalLMOutputWithPast(router_logits=(part, part + 1)) for part in per_layer])
    expected = torch.stack([per_layer[0][5:], per_layer[1], per_layer[0][:5]]).flatten(0, 1)
    assert torch.equal(output.router_logits[0], expected)
    assert torch.equal(output.router_logits[1], expected + 1)


@pytest.mark.parametrize(
    ("name", "padding"),
    [("sequences", 9), ("", 9), ("logits", -INF), ("scores", -INF), ("beam_indices", -1), ("attentions", 0)],
)
def test_shorter_parts_are_padded_on_the_right(name, padding):
    dtype = torch.long if name in ("sequences", "beam_indices") else torch.float
    output = joiner(pad_token_id=9).join([torch.zeros(2, 2, dtype=dtype), torch.zeros(1, 3, dtype=dtype)], name)
    assert output[[0, 2], 2].tolist() == [padding] * 2
    assert torch.isfinite(output[:, :2]).all() and torch.isfinite(output[1]).all()


def test_padding_leaves_softmax_and_argmax_right():
    narrow, wide = torch.tensor([[-5.0, -1.0], [-1.0, -5.0]]), torch.tensor([[0.0, 1.0, 2.0]])
    output = joiner().join([SequenceClassifierOutput(logits=narrow), SequenceClassifierOutput(logits=wide)])
    assert output.logits.argmax(-1).tolist() == [0, 2, 1]
    torch.testing.assert_close(output.logits.softmax(-1)[[2, 0], :2], narrow.softmax(-1))
    assert output.logits.softmax(-1)[[2, 0], 2].tolist() == [0.0, 0.0]


def test_every_axis_is_padded():
    output = joiner().join([torch.ones(2, 1, 4), torch.ones(1, 3, 2)], "attentions")
    assert output.shape == (3, 3, 4)
    assert output.sum((1, 2)).tolist() == [4.0, 6.0, 4.0]


def test_nested_tuples_keep_their_structure_and_absent_entries():
    parts = [(None, (column(2, 0), column(5, 3))), (None, (column(1), column(4)))]
    hidden = joiner().join([BaseModelOutputWithPast(hidden_states=part) for part in parts]).hidden_states
    assert hidden[0] is None
    assert [layer.flatten().tolist() for layer in hidden[1]] == [[0, 1, 2], [3, 4, 5]]


def test_the_output_class_is_kept_and_caches_are_dropped():
    parts = [CausalLMOutputWithPast(logits=column(2.0, 0.0), past_key_values=object())]
    parts += [CausalLMOutputWithPast(logits=column(1.0), past_key_values=object())]
    output = joiner().join(parts)
    assert type(output) is CausalLMOutputWithPast
    assert output.logits.flatten().tolist() == [0, 1, 2]
    assert output.past_key_values is None
    assert list(output) == ["logits"]


def test_plain_dicts_and_tuples_keep_their_type():
    assert type(joiner().join([{"a": column(2, 0)}, {"a": column(1)}])) is dict
    parts = [(column(2, 0), torch.tensor(3.0)), (column(1), torch.tensor(3.0))]
    output = joiner().join(parts)
    assert type(output) is tuple
    assert output[0].flatten().tolist() == [0, 1, 2]
    assert output[1].item() == 3.0


def test_a_field_that_does_not_follow_the_rows_is_kept_where_groups_agree():
    scale = torch.tensor(3.0)
    assert joiner().join([scale, scale.clone()], "logit_scale").shape == ()
    texts = torch.randn(5, 4)
    output = joiner(proof=TEXTS).join([texts, texts.clone()], "text_embeds", "text_embeds")
    assert torch.equal(output, texts)


def test_a_field_that_does_not_follow_the_rows_gets_a_row_axis_where_groups_differ():
    output = joiner().join([torch.tensor(3.0), torch.tensor(4.0)], "logit_scale")
    assert output.tolist() == [3.0, 4.0, 3.0]
    first, second = torch.randn(5, 4), torch.randn(5, 4)
    output = joiner(proof=TEXTS).join([first, second], "text_embeds", "text_embeds")
    assert torch.equal(output, torch.stack([first, second, first]))


@pytest.mark.parametrize("prompts", [1, 2, 3, 4], ids=lambda n: f"{n} prompts")
def test_prompts_are_not_taken_for_rows_whatever_their_number(prompts):
    def part(group):
        rows = group.float()
        scores = rows[:, None] * 10 + torch.arange(float(prompts))
        texts = torch.arange(float(prompts))[:, None]
        return CLIPOutput(
            logits_per_image=scores, logits_per_text=scores.T, text_embeds=texts, image_embeds=rows[:, None]
        )

    output = joiner(proof=TEXTS).join([part(group) for group in GROUPS])
    expected = torch.arange(3.0)[:, None] * 10 + torch.arange(float(prompts))
    assert torch.equal(output.logits_per_image, expected)
    assert torch.equal(output.logits_per_text, expected.T)
    assert output.text_embeds.flatten().tolist() == list(range(prompts))
    assert output.image_embeds.flatten().tolist() == [0, 1, 2]


def test_a_field_that_nothing_is_known_of_is_refused():
    with pytest.raises(
        InputError, match=r"The output 'odd' depends on all rows of a batch, so those of several experts"
    ):
        joiner(proof=TEXTS).join([column(2, 0), column(1)], "odd", "odd")
    with pytest.raises(InputError, match=r"The output 'new' was missing in the probe of this call"):
        joiner(proof=TEXTS).join([column(2, 0), column(1)], "new", "new")
    with pytest.raises(InputError, match=r"The output 'image_embeds' has 4 entries for 2 rows, but had 1 per row"):
        joiner(proof=TEXTS).join([torch.zeros(4, 1), torch.zeros(1, 1)], "image_embeds", "image_embeds")


def test_entries_of_an_input_go_back_to_their_places():
    owner = torch.tensor([0, 0, 1, 2, 2])  # images of three rows
    proof = Proof("items", {"seen": AlongItems("pixel_values", 1, 1)})
    taken = [torch.cat([torch.arange(5.0)[owner == row] for row in group.tolist()])[:, None] for group in GROUPS]
    output = joiner(proof=proof, reading={"pixel_values": Owned(0, owner)}).join(taken, "seen", "seen")
    assert output.flatten().tolist() == [0, 1, 2, 3, 4]


def test_losses_are_averaged_over_the_labels_that_count():
    parts = [CausalLMOutputWithPast(loss=torch.tensor(1.0)), CausalLMOutputWithPast(loss=torch.tensor(5.0))]
    assert joiner(loss_weights=[30.0, 10.0]).join(parts).loss.item() == pytest.approx(2.0)


def test_losses_over_a_given_number_of_items_are_summed():
    parts = [CausalLMOutputWithPast(loss=torch.tensor(1.0)), CausalLMOutputWithPast(loss=torch.tensor(5.0))]
    assert joiner(loss_weights=[30.0, 10.0], sum_losses=True).join(parts).loss.item() == 6.0


def test_a_group_without_labels_does_not_spoil_the_loss():
    losses = [torch.tensor(float("nan")), torch.tensor(5.0)]
    assert joiner(loss_weights=[0.0, 4.0]).join(losses, "loss").item() == 5.0
    assert joiner(loss_weights=[0.0, 0.0]).join([losses[0]] * 2, "loss").isnan()


def test_a_loss_per_row_is_not_averaged():
    assert joiner().join([torch.tensor([2.0, 0.0]), torch.tensor([1.0])], "loss").tolist() == [0.0, 1.0, 2.0]


def test_beam_indices_count_the_beams_of_the_whole_batch():
    # Two beams per row; row 2 is the first of its group, row 0 the second.
    parts = [torch.tensor([[0, 1, -1], [3, 2, 2]]), torch.tensor([[1, 0, 0, 1]])]
    output = joiner(num_beams=2).join(parts, "beam_indices")
    assert output.tolist() == [[1, 0, 0, -1], [3, 2, 2, 3], [4, 5, -1, -1]]


def test_groups_that_finished_early_emit_padding_with_certainty():
    def part(rows, steps):
        return GenerateBeamDecoderOnlyOutput(
            sequences=torch.ones(rows, steps, dtype=torch.long),
            scores=tuple(torch.full((rows * 2, 4), float(step)) for step in range(steps)),
            hidden_states=tuple((torch.full((rows * 2, 1, 5), 1.0),) * 3 for _ in range(steps)),
        )

    output = joiner(pad_token_id=3, num_beams=2).join([part(2, 1), part(1, 2)])
    assert output.sequences.tolist() == [[1, 3], [1, 1], [1, 3]]
    assert [step.shape for step in output.scores] == [(6, 4), (6, 4)]
    assert output.scores[1][2:4].tolist() == [[1.0] * 4] * 2
    assert output.scores[1][[0, 1, 4, 5]].tolist() == [[-INF, -INF, -INF, 0.0]] * 4
    assert output.hidden_states[1][2].shape == (6, 1, 5)
    assert output.hidden_states[1][2].sum((1, 2)).tolist() == [0.0, 0.0, 5.0, 5.0, 0.0, 0.0]


def test_lists_of_things_follow_the_rows_and_lists_of_tensors_the_layers():
    segments = joiner().join([{"segments": [["c"], ["a"]]}, {"segments": [["b", "b"]]}])["segments"]
    assert segments == [["a"], ["b", "b"], ["c"]]
    layers = joiner().join([[column(2, 0), column(5, 3)], [column(1), column(4)]], "image_intermediates")
    assert [layer.flatten().tolist() for layer in layers] == [[0, 1, 2], [3, 4, 5]]


def test_plain_values_pass_where_equal_and_are_refused_where_not():
    assert joiner().join(["same", "same"], "note") == "same"
    with pytest.raises(InputError, match="'note' of several experts cannot be combined"):
        joiner().join(["one", "another"], "note")


@pytest.mark.parametrize(
    ("output", "field"),
    [
        (lambda rows: {"array": np.zeros((rows, 2))}, " 'array'"),
        (lambda rows: {"array": np.zeros(1)}, " 'array'"),  # equal, but nothing says that it is of no row
        (lambda rows: {"layers": [np.zeros(2)] * rows}, " 'layers.0'"),
        (lambda rows: np.zeros((rows, 2)), ""),
    ],
    ids=["rows", "one number", "list", "bare"],
)
def test_numpy_arrays_are_refused_by_name(output, field):
    with pytest.raises(InputError, match=f"^The output{field} is a numpy array, .*return a tensor"):
        joiner().join([output(2), output(1)])


class Incomparable:
    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


def test_what_cannot_be_compared_is_refused_by_name():
    with pytest.raises(InputError, match="'table' of several experts cannot be combined"):
        joiner().join([{"table": Incomparable()}, {"table": Incomparable()}])


def test_nothing_stays_nothing():
    assert joiner().join([None, None], "loss") is None


def test_lists_of_what_images_have_go_back_into_their_order():
    owner = torch.tensor([0, 1, 1, 3])  # row 2 has no image
    proof = Proof("items", lists={"images": Entries("pixel_values"), "rows": Entries(None)})
    joiner = Joiner(
        rows=4, groups=[torch.tensor([3, 1]), torch.tensor([2]), torch.tensor([0])], loss_weights=[2.0, 1.0, 1.0],
        proof=proof, reading={"pixel_values": Owned(0, owner)},
    )  # fmt: skip
    image, row = [torch.full((2,), float(i)) for i in range(4)], [torch.full((3,), float(i)) for i in range(4)]
    joined = joiner.join(
        [
            {"images": (image[3], image[1], image[2]), "rows": [row[3], row[1]]},
            {"images": None, "rows": [row[2]]},
            {"images": (image[0],), "rows": [row[0]]},
        ]
    )
    assert [int(entry[0]) for entry in joined["images"]] == [0, 1, 2, 3]
    assert isinstance(joined["images"], tuple)
    assert [int(entry[0]) for entry in joined["rows"]] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="'images' does not follow the rows"):
        joiner.join([{"images": (image[3],)}, {"images": None}, {"images": (image[0],)}])


def test_a_list_that_grows_with_the_images_is_proven_to_follow_them():
    owner = torch.tensor([0, 1, 1])
    reading = {"x": Owned(0, owner)}
    values = torch.arange(3.0)

    def call(part):
        return {"each": tuple(value.reshape(1) for value in part["x"]), "layers": (part["ids"], part["ids"])}

    def split(reading, rows):
        return {"x": reading["x"].take(values, rows), "ids": rows.float()}

    proof = prove(call, split, {"items": reading}, 2)
    assert proof.lists == {"each": Entries("x")}
    assert proof.places == {"layers.0": Along(0, 1), "layers.1": Along(0, 1)}
    assert not proof.refused
