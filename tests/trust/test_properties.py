"""Whatever the values: configurations survive JSON or are refused, headers are understood or refused, models are saved
and loaded bit for bit."""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from retex_hf import CheckpointError, ConfigError, RetexConfig, RetexModel
from retex_hf.checkpoints.manifest import is_inside
from retex_hf.checkpoints.sources import SAFETENSORS_DTYPES, open_files
from retex_hf.config import FACTOR_ORDERS, FEATURE_SOURCES, POOLINGS, RECOVERIES, RECOVERY_DTYPES, is_task_name

few = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
very_few = settings(few, max_examples=6)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
tasks = st.lists(names.filter(is_task_name), min_size=1, max_size=3, unique=True)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
counts = st.integers(1, 2**40)


@st.composite
def configs(draw: st.DrawFn) -> dict:
    """Allowed values of fields that do not depend on one another."""
    return draw(
        st.fixed_dictionaries(
            {"rank": counts | st.just("full")},
            optional={
                "task_embedding_dim": st.none() | st.integers(1, 65_536),
                "recovery_dtype": st.sampled_from(RECOVERY_DTYPES),
                "factor_order": st.sampled_from(FACTOR_ORDERS),
                "recovery": st.sampled_from(RECOVERIES),
                "exclude": st.lists(names, max_size=3),
                "heads": st.just("auto") | st.lists(names, max_size=3),
                "temperature": st.floats(1e-300, 1e300) | counts,
                "feature_layer": names | st.integers(-100, 100),
                "feature_pooling": st.sampled_from(POOLINGS),
                "feature_source": st.sampled_from(FEATURE_SOURCES),
                "num_reference": counts,
                "signature_rank": counts | st.floats(1e-300, 1.0),
                "tasks": tasks,
                "base_model": st.none() | st.dictionaries(names, scalars.filter(lambda v: v == v), max_size=3),
                "labels": st.dictionaries(
                    names,
                    st.lists(names, max_size=4).map(
                        lambda labels: {"id2label": {str(index): label for index, label in enumerate(labels)}}
                    ),
                    max_size=2,
                ),
            },
        )
    )


@few
@given(values=configs())
def test_a_configuration_survives_json(values):
    config = RetexConfig(**values)
    assert RetexConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", [field.name for field in fields(RetexConfig)])
@settings(few, max_examples=25)
@given(value=anything)
def test_any_value_of_a_field_is_refused_or_survives_json(name, value):
    try:
        config = RetexConfig(**{name: value})
    except ConfigError as error:
        assert "\n" not in str(error) and "RetexConfig" in str(error)
        return
    text = json.dumps(config.to_dict())
    assert json.dumps(RetexConfig.from_dict(json.loads(text)).to_dict()) == text


@few
@given(
    name=st.text(max_size=12) | st.lists(st.sampled_from(["a", "..", ".", "", "b.c", "C:"]), max_size=4).map("/".join)
)
def test_a_name_that_is_inside_stays_inside(name):
    root = Path("artifact").absolute()
    if is_inside(name):
        assert Path(str(root / name)).resolve().is_relative_to(root) and (root / name) != root


shapes = st.lists(st.integers(0, 3), max_size=3)
entries = st.dictionaries(names, st.tuples(st.sampled_from(sorted(SAFETENSORS_DTYPES)), shapes), max_size=4)


def safetensors(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@few
@given(entries=entries)
def test_a_right_header_is_understood(tmp_path, entries):
    header, end = {}, 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + prod(shape) * SAFETENSORS_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(header, bytes(end)))
    source = open_files([path], "x")
    assert {name: (info.dtype, list(info.shape)) for name, info in source.infos.items()} == {
        name: (SAFETENSORS_DTYPES[dtype], shape) for name, (dtype, shape) in entries.items()
    }
    for name, info in source.infos.items():
        assert tuple(source.read(name).shape) == info.shape


sizes = st.integers(-4, 70) | st.sampled_from([2**31, 2**62, 2**63, 2**64])
wrong_entries = st.dictionaries(
    names,
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*SAFETENSORS_DTYPES, "F4", "X"]) | scalars,
            "shape": st.lists(sizes, max_size=3) | anything,
            "data_offsets": st.lists(sizes, min_size=2, max_size=2) | anything,
        }
    )
    | anything,
    max_size=3,
)


@few
@given(header=wrong_entries | anything, data=st.binary(max_size=64))
def test_any_header_is_refused_or_describes_what_is_there(tmp_path, header, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(header, data))
    try:
        source = open_files([path], "x")
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    held = sum(source.read(name).numel() * info.dtype.itemsize for name, info in source.infos.items())
    assert held == len(data)


@few
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        open_files([path], "x")


@very_few
@given(
    tasks=tasks,
    width=st.sampled_from([4, 6, 10]),
    layers=st.integers(1, 2),
    rank=st.integers(1, 12) | st.just("full"),
    dtype=st.sampled_from(RECOVERY_DTYPES),
    order=st.sampled_from(FACTOR_ORDERS),
    heads=st.sampled_from(["auto", ["pooler"]]),
    shard=st.sampled_from(["5GB", "2KB"]),
)
def test_any_small_model_is_saved_and_loaded_bit_for_bit(
    tmp_path_factory, tasks, width, layers, rank, dtype, order, heads, shard
):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
    }
    base = BertModel(BertConfig(vocab_size=9, max_position_embeddings=8, **sizes)).eval()
    experts = {
        task: {name: tensor + 0.1 * torch.randn(tensor.shape) for name, tensor in base.state_dict().items()}
        for task in tasks
    }
    config = RetexConfig(rank=rank, recovery_dtype=dtype, factor_order=order, heads=heads)
    model = RetexModel.from_experts(base, experts, config, progress=False, check_base=False)
    folder = tmp_path_factory.mktemp("any") / "artifact"
    model.save_pretrained(folder, max_shard_size=shard)
    loaded = RetexModel.from_pretrained(folder, check_finite=True)
    assert loaded.retex_config == model.retex_config
    for task in tasks:
        saved, found = model.recover(task), loaded.recover(task)
        assert saved.keys() == found.keys()
        assert all(torch.equal(saved[name], found[name]) for name in saved)
