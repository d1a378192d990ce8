"""torch's multi-head attention in one pass: every option of the module, and the weights it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retex_hf import RetexConfig, RetexModel
from retex_hf.execution.mixed import MixedUnsupported
from retex_hf.execution.mixed.operations import multi_head_attention

WIDTH, HEADS = 6, 2
TASKS = ["t0", "t1", "t0", "t1", "t1"]
ROWS, LENGTH = len(TASKS), 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def seeded_without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def randomise(module: nn.Module) -> nn.Module:
    """Draw every parameter: torch's own starting values leave biases at zero."""
    for tensor in module.parameters():
        tensor.normal_(std=0.5)
    return module.eval()


class Attention(nn.Module):
    """An attention module whose call is given, and a layer that reads its weights."""

    def __init__(self, call: Callable[[nn.Module, Tensor], tuple], **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True} | options)
        self.head = nn.Linear(WIDTH, 3)
        self.call = call
        randomise(self)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        y, weights = self.call(self.attention, x)
        seen = y if weights is None else y * weights.flatten(1).amax(1)[:, None, None]
        return {"y": self.head(y), "weights": weights, "z": self.head(seen)}


def retex(make: Callable[[], nn.Module], execution: str) -> RetexModel:
    experts = {"t0": make(), "t1": make()}
    config = RetexConfig(rank="full")
    return RetexModel.from_experts(make(), experts, config, execution=execution, check_base=False, progress=False)


def compare(make: Callable[[], nn.Module], x: Tensor, task: list[str] | str, executions: tuple[str, ...]) -> dict:
    """Compare each execution with the experts that go group by group; return their output."""
    torch.manual_seed(1)
    expected = retex(make, "grouped")(x, task=task)
    for execution in executions:
        torch.manual_seed(1)
        found = retex(make, execution)(x, task=task)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] is None) == (value is None), name
            if value is not None:
                torch.testing.assert_close(found[name], value, **CLOSE)
    return expected


def self_attention(**options) -> Callable[[nn.Module, Tensor], tuple]:
    return lambda attention, x: attention(x, x, x, **options)


@pytest.mark.parametrize("task", [TASKS, "t1"], ids=["two tasks", "one task"])
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (ROWS, LENGTH, LENGTH)),
        ({"average_attn_weights": False}, (ROWS, HEADS, LENGTH, LENGTH)),
        ({"need_weights": False}, None),
    ],
    ids=["averaged", "per head", "not needed"],
)
def test_attention_weights_are_returned(options, shape, task):
    found = compare(
        lambda: Attention(self_attention(**options)), torch.randn(ROWS, LENGTH, WIDTH), task, ("mixed", "auto")
    )
    assert found["weights"] is None if shape is None else found["weights"].shape == shape


PADDING = torch.tensor([False, False, False, True])
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
FLOAT_CAUSAL = torch.zeros(LENGTH, LENGTH).masked_fill(CAUSAL, -float("inf"))


def first(attention: nn.Module, x: Tensor, **options) -> tuple:
    """Queries, keys and values of rows along the second axis."""
    x = x.transpose(0, 1)
    y, weights = attention(x, x, x, **options)
    return y.transpose(0, 1), weights


def padded(attention: nn.Module, x: Tensor, **options) -> tuple:
    """Hide positions by what a row holds, so that the mask belongs to its row."""
    hidden = x[..., 0] > 0.5
    hidden[:, 0] = False
    return attention(x, x, x, key_padding_mask=hidden, **options)


def biased(attention: nn.Module, x: Tensor, **options) -> tuple:
    """Add to the scores what a row holds: a mask of three axes."""
    mask = (x[:, None, :, :1] * x[:, None, None, :, 0]).repeat(1, HEADS, 1, 1).flatten(0, 1)
    return attention(x, x, x, attn_mask=mask, **options)


FORMS = {
    "rows second": (first, {"batch_first": False}),
    "key_padding_mask": (padded, {}),
    "bool attn_mask": (lambda a, x, **o: a(x, x, x, attn_mask=CAUSAL, **o), {}),
    "float attn_mask": (lambda a, x, **o: a(x, x, x, attn_mask=FLOAT_CAUSAL / 2, **o), {}),
    "attn_mask per row": (biased, {}),
    "both masks": (lambda a, x, **o: padded(a, x, attn_mask=CAUSAL, **o), {}),
    "is_causal": (lambda a, x, **o: a(x, x, x, attn_mask=CAUSAL, is_causal=True, **o), {}),
    "is_causal and padding": (lambda a, x, **o: padded(a, x, attn_mask=CAUSAL, is_causal=True, **o), {}),
    "add_zero_attn": (lambda a, x, **o: padded(a, x, attn_mask=CAUSAL, **o), {"add_zero_attn": True}),
    "bias_k and bias_v": (lambda a, x, **o: padded(a, x, attn_mask=CAUSAL, **o), {"add_bias_kv": True}),
    "everything": (biased, {"add_bias_kv": True, "add_zero_attn": True}),
    "kdim and vdim": (lambda a, x, **o: a(x, x[:, :3, :5], x[:, :3, :4], **o), {"kdim": 5, "vdim": 4}),
    "kdim without bias": (lambda a, x, **o: a(x, x[..., :5], x, **o), {"kdim": 5, "bias": False}),
    "cross attention": (lambda a, x, **o: a(x[:, :2], x, x, **o), {}),
    "values unlike keys": (lambda a, x, **o: a(x, x.flip(1), x.roll(1, 2), **o), {}),
    "no bias": (lambda a, x, **o: a(x, x, x, **o), {"bias": False}),
    "dropout of a model in evaluation": (lambda a, x, **o: a(x, x, x, **o), {"dropout": 0.5}),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_attention_are_exact_in_one_pass(name, need_weights):
    call, options = FORMS[name]
    make = lambda: Attention(lambda a, x: call(a, x, need_weights=need_weights), **options)  # noqa: E731
    compare(make, torch.randn(ROWS, LENGTH, WIDTH), TASKS, ("mixed",))


class Prompts(nn.Module):
    """Attention within texts that all rows share: it has one result per task, and so have its weights."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.register_buffer("texts", torch.linspace(-1, 1, 3 * LENGTH * WIDTH).sin().view(3, LENGTH, WIDTH))
        randomise(self)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y, weights = self.attention(self.texts, self.texts, self.texts, attn_mask=CAUSAL)
        return {"y": x @ (y + weights[..., :1]).mean(1).mT}


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}], ids=str)
def test_attention_without_rows_has_one_result_per_task(options):
    compare(lambda: Prompts(**options), torch.randn(ROWS, WIDTH), TASKS, ("mixed",))


def arguments(**changed) -> dict:
    """Arguments of torch's function for plain tensors; inputs are (length, rows, width)."""
    x = torch.randn(LENGTH, ROWS, WIDTH)
    given = {
        "query": x, "key": x, "value": x, "embed_dim_to_check": WIDTH, "num_heads": HEADS,
        "in_proj_weight": torch.randn(3 * WIDTH, WIDTH), "in_proj_bias": torch.randn(3 * WIDTH), "bias_k": None,
        "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0, "out_proj_weight": torch.randn(WIDTH, WIDTH),
        "out_proj_bias": torch.randn(WIDTH), "training": False,
    }  # fmt: skip
    return given | changed


PLAIN = {
    "bool attn_mask": {"attn_mask": CAUSAL},
    "bool masks": {"attn_mask": CAUSAL, "key_padding_mask": PADDING.expand(ROWS, -1)},
    # torch takes the hint at its word where it needs the mask for nothing else.
    "hint unlike the mask": {"attn_mask": FLOAT_CAUSAL.T, "is_causal": True},
    "bias of keys": {"bias_k": torch.ones(1, 1, WIDTH), "bias_v": torch.ones(1, 1, WIDTH), "add_zero_attn": True},
    "nothing to attend to": {"key_padding_mask": torch.ones(ROWS, LENGTH, dtype=torch.bool)},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_attended_to_as_torch_does(name, need_weights):
    given = arguments(**PLAIN[name], need_weights=need_weights)
    found, expected = multi_head_attention(None, None, **given), F.multi_head_attention_forward(**given)
    torch.testing.assert_close(found, expected, equal_nan=True, **CLOSE)


REFUSED = {
    "static_k": {"static_k": torch.randn(ROWS * HEADS, LENGTH, WIDTH // HEADS)},
    "static_v": {"static_v": torch.randn(ROWS * HEADS, LENGTH, WIDTH // HEADS)},
    "dropout": {"training": True, "dropout_p": 0.5},
    "no row axis": {name: torch.randn(LENGTH, WIDTH) for name in ("query", "key", "value")},
    "keys of one row": {"key": torch.randn(LENGTH, 1, WIDTH), "value": torch.randn(LENGTH, 1, WIDTH)},
    "is_causal without a mask": {"is_causal": True},
    "bias_k alone": {"bias_k": torch.ones(1, 1, WIDTH)},
    "bias_v alone": {"bias_v": torch.ones(1, 1, WIDTH)},
    "mask of one query": {"attn_mask": torch.zeros(1, LENGTH)},
    "padding of one row": {"key_padding_mask": torch.zeros(1, LENGTH)},
    "mask of integers": {"attn_mask": torch.zeros(LENGTH, LENGTH, dtype=torch.long)},
    "another width": {"embed_dim_to_check": WIDTH + HEADS},
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_without_an_exact_form_is_refused(name):
    with pytest.raises(MixedUnsupported):
        multi_head_attention(None, None, **arguments(**REFUSED[name]))
