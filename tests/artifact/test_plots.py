"""What is drawn is the data: lines, bands, labels, scales; and the files are pictures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from families import TEXT
from helpers import TASKS, make_experts
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image
from transformers import BertConfig, BertModel

from retex_hf import RetexConfig, RetexError, RetexModel, TrainingConfig
from retex_hf.artifact.plots import (
    plot_energy_ratios,
    plot_errors,
    plot_gammas,
    plot_losses,
    plot_storage,
    save_figures,
)
from retex_hf.utils.parameter_names import layer_type
from retex_hf.workflows.analysis import StoragePoint, analyse


def make_records(count: int, gammas: bool = False, factor: float = 0.5) -> list[dict]:
    """Losses that fall by a factor from record to record, and gammas of two types of layers and of one single layer."""
    records = []
    for index in range(count):
        record = {
            "step": 10 * (index + 1),
            "loss": 8.0 * factor**index,
            "relative_error": 1 / (index + 1),
            "learning_rate": 0.1,
        }
        if gammas:
            record["gamma"] = {
                "embed.weight": 1.0,
                "layer.0.query.weight": 1 + 0.1 * index,
                "layer.0.value.weight": 0.9,
                "layer.1.query.weight": 1 - 0.3 * index,
                "layer.1.value.weight": 0.7,
            }
        records.append(record)
    return records


def make_errors(layers: int) -> dict[str, float]:
    errors = {"embeddings.word_embeddings.weight": 0.4}
    for layer in range(layers):
        for place, kind in enumerate(("query", "key", "value", "dense")):
            errors[f"encoder.layer.{layer}.{kind}.weight"] = 0.1 * (place + 1) + 0.01 * layer
            errors[f"encoder.layer.{layer}.{kind}.bias"] = 0.0
    errors["pooler.dense.weight"] = 0.3
    return errors


POINTS = [StoragePoint(8, 0.2, 0.5, 0.19, 0.4), StoragePoint(2, 0.05, 0.8, 0.05, 0.7)]


def lines(axes) -> dict[str, tuple[list[float], list[float]]]:
    """Labelled lines as {label: (x, y)}."""
    labelled = [line for line in axes.lines if line.get_label() and not line.get_label().startswith("_child")]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in labelled}


def legend_texts(figure: Figure) -> list[str]:
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def assert_png(path: Path) -> None:
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert min(image.size) > 300
        assert len(image.convert("L").getcolors()) > 10  # not blank


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_losses_are_drawn_over_steps():
    records = make_records(6)
    figure = plot_losses(records)
    above, below = figure.axes
    assert above.lines[0].get_xdata().tolist() == [10, 20, 30, 40, 50, 60]
    assert above.lines[0].get_ydata().tolist() == [8.0, 4.0, 2.0, 1.0, 0.5, 0.25]
    assert below.lines[0].get_ydata().tolist() == [1 / n for n in range(1, 7)]
    assert (len(above.lines), len(below.lines)) == (1, 1)
    # Losses fall by a factor of 32, errors by one of 6.
    assert (above.get_yscale(), below.get_yscale()) == ("log", "linear")
    assert "step" in below.get_xlabel() and "Loss" in above.get_ylabel() and "error" in below.get_ylabel()
    assert legend_texts(figure) == []


def test_several_runs_are_overlaid():
    figure = plot_losses({"exact start": make_records(3), "$paper": make_records(4, factor=0.9)})
    for axes, key in zip(figure.axes, ("loss", "relative_error"), strict=True):
        drawn = lines(axes)
        assert list(drawn) == ["exact start", r"\$paper"]
        assert drawn["exact start"][1] == [record[key] for record in make_records(3)]
        assert drawn[r"\$paper"][1] == [record[key] for record in make_records(4, factor=0.9)]
    assert legend_texts(figure) == ["exact start", r"\$paper"]


def test_long_runs_have_a_running_mean():
    records = make_records(60, factor=1.0)
    for index, record in enumerate(records):
        record["loss"] = float(index % 3)
    axes = plot_losses({"run": records}).axes[0]
    values, mean = axes.lines
    assert values.get_ydata().tolist() == [record["loss"] for record in records]
    assert mean.get_ydata().tolist() == [0.5] + [1.0] * 58 + [1.5]  # over 60 / 20 = 3 records
    assert axes.get_yscale() == "linear"  # a loss of zero has no logarithm
    assert values.get_color() == mean.get_color()
    assert values.get_alpha() < 1 and mean.get_alpha() is None


def test_a_single_record_is_visible():
    figure = plot_losses(make_records(1))
    assert [axes.lines[0].get_marker() for axes in figure.axes] == ["o", "o"]


@pytest.mark.parametrize("records", [[], {}, {"run": []}, {"run": make_records(2), "other": []}], ids=str)
def test_losses_need_records(records):
    with pytest.raises(RetexError, match="no training records"):
        plot_losses(records)


def test_incomplete_records_are_named():
    with pytest.raises(RetexError, match=r"no 'relative_error'; it holds \['loss', 'step'\]"):
        plot_losses([{"step": 1, "loss": 2.0}])


# ---- gammas ----------------------------------------------------------------------------------------------------------


def test_gammas_by_type_with_bands():
    figure = plot_gammas(make_records(3, gammas=True))
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["embed.weight", "layer.query.weight", "layer.value.weight"]
    expected = {
        "embed.weight": ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        "layer.query.weight": ([1.0, 0.9, 0.8], [1.0, 0.7, 0.4], [1.0, 1.1, 1.2]),
        "layer.value.weight": ([0.8] * 3, [0.7] * 3, [0.9] * 3),
    }
    for kind, (mean, least, greatest) in expected.items():
        axes = panels[kind]
        assert axes.lines[0].get_xdata().tolist() == [10, 20, 30]
        assert axes.lines[0].get_ydata().tolist() == pytest.approx(mean)
        (band,) = axes.collections
        corners = band.get_paths()[0].vertices
        for step, low, high in zip([10, 20, 30], least, greatest, strict=True):
            heights = corners[corners[:, 0] == step, 1]
            assert (heights.min(), heights.max()) == pytest.approx((low, high))
    # All panels show the same range, and where the merged weights are.
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert all(set(axes.lines[1].get_ydata()) == {1.0} for axes in figure.axes)


def test_gamma_panels_fill_rows_of_four():
    gamma = {f"layer.{kind}.weight": 1.0 for kind in "abcdefghi"}
    figure = plot_gammas([{"step": 1, "gamma": gamma}])
    assert len(figure.axes) == 9
    assert [axes.get_subplotspec().rowspan.start for axes in figure.axes] == [0] * 4 + [1] * 4 + [2]


def test_long_type_names_are_broken_at_a_dot():
    name = "bert.encoder.layer.attention.output.dense.weight"
    figure = plot_gammas([{"step": 1, "gamma": {name: 1.0}}])
    title = figure.axes[0].get_title()
    assert title.replace("\n", "") == name
    assert max(map(len, title.split("\n"))) < 30


@pytest.mark.parametrize("records", [[], make_records(3)], ids=["empty", "offset"])
def test_gammas_need_affine_recovery(records):
    with pytest.raises(RetexError, match=r"No gamma was recorded.*affine"):
        plot_gammas(records)


# ---- energy ratios ---------------------------------------------------------------------------------------------------


def test_ratios_are_drawn_against_q():
    ratios = {"red": torch.tensor([0.5, 0.75, 1.0], dtype=torch.float64), "_blue": [0.25, 1.0]}
    figure = plot_energy_ratios(ratios)
    (axes,) = figure.axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {"red": ([1, 2, 3], [0.5, 0.75, 1.0]), "_blue": ([1, 2], [0.25, 1.0])}
    assert axes.get_xscale() == "log"
    assert axes.get_ylim()[0] == 0
    assert legend_texts(figure) == ["red", "_blue"]
    assert axes.get_legend() is not None  # two tasks fit inside


def test_many_tasks_are_told_apart_beside_the_axes():
    figure = plot_energy_ratios({f"task {n}": [0.5, 1.0] for n in range(28)})
    (axes,) = figure.axes
    assert axes.get_legend() is None
    assert legend_texts(figure) == [f"task {n}" for n in range(28)]
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in axes.lines}) == 28
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().x0 >= axes.get_window_extent().x1
    assert axes.get_window_extent().width > 0.6 * figure.bbox.width  # the legend does not squeeze them


@pytest.mark.parametrize("ratios", [{}, {"red": []}, {"red": torch.empty(0)}], ids=["none", "list", "tensor"])
def test_ratios_need_values(ratios):
    with pytest.raises(RetexError, match="no energy ratios"):
        plot_energy_ratios(ratios)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_in_the_order_of_the_model_by_type():
    errors = make_errors(30)
    names = list(errors)
    assert len(names) == 242
    figure = plot_errors(errors)
    (axes,) = figure.axes
    drawn = lines(axes)
    lossy = [f"encoder.layer.{kind}.weight" for kind in ("query", "key", "value", "dense")]
    assert list(drawn) == ["stored exactly (120)", "embeddings.word_embeddings.weight", *lossy, "pooler.dense.weight"]
    assert drawn["encoder.layer.key.weight"] == (
        [names.index(f"encoder.layer.{layer}.key.weight") for layer in range(30)],
        [errors[f"encoder.layer.{layer}.key.weight"] for layer in range(30)],
    )
    # Every parameter is there once.
    points = sorted(point for x, y in drawn.values() for point in zip(x, y, strict=True))
    assert points == list(enumerate(errors.values()))
    looks = {(to_hex(line.get_color()), line.get_marker()) for line in axes.lines}
    assert len(looks) == len(drawn)
    assert legend_texts(figure) == list(drawn)


def test_blocks_of_the_model_are_named_below_their_parameters():
    errors = make_errors(2)
    (axes,) = plot_errors(errors).axes
    ticks = dict(zip((t.get_text() for t in axes.get_xticklabels()), axes.get_xticks().tolist(), strict=True))
    # One embedding, two layers of eight parameters, one pooler.
    assert ticks == {"embeddings": 0.0, "encoder.layer.0": 4.5, "encoder.layer.1": 12.5, "pooler": 17.0}


@pytest.mark.parametrize("layers", [1, 12, 100])
def test_tick_labels_do_not_overlap(layers):
    errors = make_errors(layers)
    # Two towers: the last block of one and the first of the other are next to each other, and small.
    both = {f"{tower}_model.{name}": error for tower in ("vision", "text") for name, error in errors.items()}
    figure = plot_errors(both)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert min(2 * layers, 10) < len(boxes) <= 32
    assert axes.get_window_extent().height > 0.4 * figure.bbox.height  # the labels do not squeeze them
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_types_that_are_exact_in_some_layers_only_are_shown_as_types():
    (axes,) = plot_errors({"layer.0.weight": 0.0, "layer.1.weight": 0.5, "layer.0.bias": 1e-8}).axes
    assert lines(axes) == {"stored exactly (1)": ([2], [1e-8]), "layer.weight": ([0, 1], [0.0, 0.5])}


def test_errors_need_parameters():
    with pytest.raises(RetexError, match="no recovery errors"):
        plot_errors({})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.layer.11.attention.self.query.weight", "encoder.layer.attention.self.query.weight"),
        ("0.1.weight", "weight"),
        ("stages.0.layers.1.2.conv1.weight", "stages.layers.conv1.weight"),
        ("logit_scale", "logit_scale"),
        ("0", "0"),
    ],
)
def test_layer_types(name, expected):
    assert layer_type(name) == expected


# ---- storage ---------------------------------------------------------------------------------------------------------


def test_storage_curves():
    figure = plot_storage(POINTS)
    (axes,) = figure.axes
    assert lines(axes) == {
        "one rank everywhere": ([0.05, 0.2], [0.8, 0.5]),
        "a budget of bytes": ([0.05, 0.19], [0.7, 0.4]),
    }
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("r=2", (0.05, 0.8)), ("r=8", (0.2, 0.5))]
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_major_formatter()(0.05, 0) == "5 %"
    assert axes.xaxis.get_major_formatter()(0.002, 0) == "0.2 %"
    assert legend_texts(figure) == ["one rank everywhere", "a budget of bytes"]


def test_storage_needs_points():
    with pytest.raises(RetexError, match="no points"):
        plot_storage([])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_figures_of_a_real_build(tmp_path):
    base = BertModel(BertConfig(**TEXT)).eval()
    experts = make_experts(base)
    training = TrainingConfig(steps=12, warmup_steps=2, log_every=3, learning_rate=1e-2)
    model = RetexModel.from_experts(
        base, experts, RetexConfig(rank=4, recovery="affine"), solver="adam", training=training, progress=False
    )
    analysis = analyse(model, experts, progress=False)
    paths = save_figures(
        tmp_path / "model",
        records=model.training_history,
        energy_ratios=analysis.energy_ratios,
        errors=model.recovery_errors,
        storage=analysis.storage_curve(),
    )
    names = ["losses", "gammas", "energy_ratios", "errors", "storage"]
    assert paths == {name: tmp_path / "model" / "figures" / f"{name}.png" for name in names}
    for path in paths.values():
        assert_png(path)

    steps = [3, 6, 9, 12]
    assert plot_losses(model.training_history).axes[0].lines[0].get_xdata().tolist() == steps
    queries = [f"encoder.layer.{layer}.attention.self.query.weight" for layer in range(2)]
    means = [sum(record["gamma"][name] for name in queries) / 2 for record in model.training_history]
    panels = {axes.get_title().replace("\n", ""): axes for axes in plot_gammas(model.training_history).axes}
    query = panels["encoder.layer.attention.self.query.weight"].lines[0]
    assert query.get_ydata().tolist() == pytest.approx(means)
    drawn = lines(plot_energy_ratios(analysis.energy_ratios).axes[0])
    assert {task: y for task, (_, y) in drawn.items()} == {t: analysis.energy_ratios[t].tolist() for t in TASKS}


def test_only_what_there_is_data_for_is_written(tmp_path):
    assert list(save_figures(tmp_path / "a", errors={"w": 0.5}, records=[], energy_ratios={}, storage=None)) == [
        "errors"
    ]
    assert [path.name for path in (tmp_path / "a" / "figures").iterdir()] == ["errors.png"]
    assert list(save_figures(tmp_path / "b", records=make_records(3))) == ["losses"]
    assert save_figures(tmp_path / "c", records={"exact": []}) == {}
    assert not (tmp_path / "c").exists()


def test_gammas_among_several_runs(tmp_path):
    affine, offset = make_records(3, gammas=True), make_records(3)
    assert list(save_figures(tmp_path, records={"affine": affine, "offset": offset})) == ["losses", "gammas"]
    assert list(save_figures(tmp_path, records={"affine": affine, "exact": []})) == ["losses", "gammas"]
    # Two runs of gammas in one picture would be mistaken for one.
    assert list(save_figures(tmp_path, records={"one": affine, "two": affine})) == ["losses"]


@pytest.mark.parametrize(
    ("draw", "data"),
    [
        (plot_losses, make_records(3)),
        (plot_gammas, make_records(3, gammas=True)),
        (plot_energy_ratios, {"red": [0.5, 1.0]}),
        (plot_errors, make_errors(3)),
        (plot_storage, POINTS),
    ],
)
def test_a_path_saves_and_none_does_not(draw, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(draw(data), Figure)
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "new" / "picture.png"
    assert isinstance(draw(data, str(path)), Figure)
    assert_png(path)


def test_no_figure_is_registered_with_pyplot():
    plot_storage(POINTS)
    assert pyplot.get_fignums() == []
