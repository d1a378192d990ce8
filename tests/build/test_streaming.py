"""Building straight into a folder: what building in memory and saving gives, in bounded memory, whatever interrupts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from builds import assert_same_artifact, check, hidden, kill_build, save_family, save_models, tensors_of
from families import FAMILIES, TEXT
from filelock import FileLock
from helpers import TASKS, launcher, make_experts, perturb
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)

from retex_hf import ArtifactError, CheckpointError, ConfigError, RetexConfig, RetexModel, TrainingConfig
from retex_hf.build import build
from retex_hf.build.plan import prepare
from retex_hf.checkpoints import tensor_store
from retex_hf.recovery import solver
from retex_hf.utils.atomic_folder import interrupted_build


@pytest.fixture
def bert(tmp_path) -> tuple[Path, dict[str, Path]]:
    return save_family(FAMILIES["bert"], tmp_path / "models")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_built_as_in_memory(name, tmp_path):
    base, experts = save_family(FAMILIES[name], tmp_path / "models")
    check(base, experts, RetexConfig(rank=3), tmp_path)


CONFIGS = {
    "full": {"rank": "full"},
    "retex-e": {"rank": 4, "inner_rank": 2},
    "affine": {"rank": 3, "recovery": "affine"},
    "shared_first": {"rank": 3, "factor_order": "shared_first"},
    "share_layers": {"rank": 3, "share_layers": True},
    "narrow": {"rank": 3, "task_embedding_dim": 1},
    "bytes": {"storage": 0.1},
    "wide": {"rank": "full", "task_embedding_dim": 5},
    "soft": {"rank": 3, "soft_training": {"method": "dirichlet", "alpha": 0.5}, "merge": "task_arithmetic"},
    "plain": {"rank": 3, "weighting": "plain"},
    "ties": {"rank": 3, "merge": {"method": "ties", "density": 0.3}},
    "della": {"rank": 3, "merge": {"method": "della", "seed": 5, "weights": {"red": 1, "green": 0.5, "blue": 2}}},
    "pretrained": {"rank": 3, "feature_source": "pretrained"},
    "exclude": {"rank": 3, "exclude": ["*embeddings*"]},
    "bfloat16": {"rank": 3, "recovery_dtype": "bfloat16"},
    "int8": {"rank": "full", "recovery_dtype": "int8"},
    "int8-matrix": {"rank": 3, "recovery_dtype": "int8"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_variant_is_built_as_in_memory(name, bert, tmp_path):
    check(*bert, RetexConfig(**CONFIGS[name]), tmp_path)


def test_a_finished_merge_is_read_and_its_path_is_not_told(bert, tmp_path):
    base, experts = bert
    model = check(base, experts, RetexConfig(rank=3, merge=str(experts["green"])), tmp_path)
    assert model.retex_config.merge == "green"
    merged, green = tensors_of(tmp_path / "disk"), load_file(experts["green"] / "model.safetensors")
    assert all(torch.equal(merged[f"model: {name}"], tensor) for name, tensor in green.items())


def test_heads_labels_and_tokenizer_are_as_in_memory(tmp_path):
    base = BertModel(BertConfig(**TEXT)).eval()
    experts = {}
    for seed, (task, width) in enumerate({"red": 2, "green": 5}.items()):
        names = {index: f"{task}-{index}" for index in range(width)}
        experts[task] = BertForSequenceClassification(BertConfig(**TEXT, id2label=names)).eval()
        experts[task].bert.load_state_dict(perturb(base, seed).state_dict())
    base, experts = save_models(base, experts, tmp_path / "models")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]
    BertTokenizerFast(vocab={word: index for index, word in enumerate(words)}).save_pretrained(base)
    model = check(base, experts, RetexConfig(rank=3), tmp_path)
    assert model.heads["green"]["classifier.bias"].shape == (5,)
    plain, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "disk", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert plain.config.id2label == {0: "red-0", 1: "red-1"}
    assert AutoTokenizer.from_pretrained(tmp_path / "disk")("word")["input_ids"] == [2, 5, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_experts_are_built_as_in_memory(dtype, tmp_path):
    base = FAMILIES["llama-tied"].make().eval()
    experts = {task: expert.to(dtype) for task, expert in make_experts(base).items()}
    check(*save_models(base.to(dtype), experts, tmp_path / "models"), RetexConfig(rank=3), tmp_path)
    assert tensors_of(tmp_path / "disk")["model: model.embed_tokens.weight"].dtype == dtype


def test_torch_files_modules_and_state_dicts_are_built_as_in_memory(bert, tmp_path):
    base, experts = bert
    weights = {task: load_file(folder / "model.safetensors") for task, folder in experts.items()}
    torch.save(weights["red"], experts["red"] / "pytorch_model.bin")
    (experts["red"] / "model.safetensors").unlink()
    mixed = {"red": experts["red"], "green": BertModel.from_pretrained(experts["green"]), "blue": weights["blue"]}
    check(base, mixed, RetexConfig(rank=3), tmp_path)


def test_open_clip_modules_are_built_as_in_memory(tmp_path):
    family = FAMILIES["open_clip-resnet"]
    base = family.make().eval()
    check(base, make_experts(base), RetexConfig(rank=3), tmp_path, model_config=family.model_config)


@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_shards_hold_what_one_file_holds(name, tmp_path):
    base, experts = save_family(FAMILIES[name], tmp_path / "models")
    config = RetexConfig(rank=3)
    model = RetexModel.from_experts(base, experts, config, progress=False)
    model.save_pretrained(tmp_path / "memory", max_shard_size="10KB")
    RetexModel.from_experts(base, experts, config, progress=False, output_dir=tmp_path / "disk", max_shard_size="10KB")
    assert_same_artifact(tmp_path / "disk", tmp_path / "memory")
    for stem in ("model", "retex_recovery"):
        index = json.loads((tmp_path / "disk" / f"{stem}.safetensors.index.json").read_text())
        theirs = json.loads((tmp_path / "memory" / f"{stem}.safetensors.index.json").read_text())
        assert index["metadata"] == theirs["metadata"]
        for tensor, file in index["weight_map"].items():
            assert tensor in load_file(tmp_path / "disk" / file)
    assert len(list((tmp_path / "disk").glob("model-*.safetensors"))) > 1
    assert len(list((tmp_path / "disk").glob("retex_recovery-*.safetensors"))) > 1


def test_trained_recovery_is_saved_too(bert, tmp_path):
    training = TrainingConfig(steps=5, warmup_steps=1)
    check(*bert, RetexConfig(rank=3), tmp_path, solver="adam", training=training)


def test_experts_that_agree_store_no_recovery(tmp_path):
    base = FAMILIES["bert"].make().eval()
    experts = make_experts(base)
    for expert in experts.values():
        expert.embeddings.load_state_dict(base.embeddings.state_dict())
    model = check(*save_models(base, experts, tmp_path / "models"), RetexConfig(rank=3), tmp_path)
    assert model.recovery and not any(name.startswith("embeddings.") for name in model.recovery)


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_a_previous_artifact_is_replaced_and_foreign_files_are_kept(bert, tmp_path):
    base, experts = bert
    target = tmp_path / "disk"
    RetexModel.from_experts(base, experts, RetexConfig(rank=2), progress=False, output_dir=target)
    (target / "notes").mkdir()
    (target / "notes" / "mine.txt").write_text("keep me")
    (target / "README.md").write_text("mine")
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, output_dir=target)
    model = RetexModel.from_pretrained(target)
    assert model.retex_config.rank == 3
    assert (target / "notes" / "mine.txt").read_text() == "keep me"
    assert "\nmine\n" in (target / "README.md").read_text()


def nan_expert(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["pooler.dense.bias"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_bad_input_leaves_nothing_behind_and_the_previous_artifact_alone(bert, tmp_path):
    base, experts = bert
    target = tmp_path / "disk"
    RetexModel.from_experts(base, experts, RetexConfig(rank=2), progress=False, output_dir=target)
    before = tensors_of(target)
    nan_expert(experts["blue"])
    with pytest.raises(CheckpointError, match=r"'pooler\.dense\.bias' holds NaN"):
        RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, output_dir=target)
    assert hidden(tmp_path) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(target).items())
    with pytest.raises(CheckpointError):
        RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, output_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists() and hidden(tmp_path) == []


def test_a_second_build_into_the_same_folder_is_refused(bert, tmp_path):
    base, experts = bert
    lock = tmp_path / ".disk.building.lock"
    with FileLock(lock), pytest.raises(ArtifactError, match="being built by another process") as caught:
        RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, output_dir=tmp_path / "disk")
    assert "\n" not in str(caught.value) and str(tmp_path / "disk") in str(caught.value)
    assert hidden(tmp_path) == [lock.name]  # it belongs to the other build
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, output_dir=tmp_path / "disk")


def test_too_small_a_disk_is_refused_before_anything_is_written(bert, tmp_path, monkeypatch):
    base, experts = bert
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(ArtifactError, match=r"needs .* of disk, but .* has only 0.00 GB"):
        RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, output_dir=tmp_path / "disk")
    assert not (tmp_path / "disk").exists() and hidden(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_shard_size": "many"}, "max_shard_size must be"), ({"solver": "magic"}, "solver must be one of")],
)
def test_wrong_options_are_refused(bert, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        RetexModel.from_experts(*bert, RetexConfig(rank=3), progress=False, output_dir=tmp_path / "disk", **options)
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("name", ["full", "narrow", "affine", "pretrained", "int8", "share_layers"])
def test_the_estimate_is_what_the_folder_takes(name, bert, tmp_path):
    base, experts = bert
    config = RetexConfig(**CONFIGS[name])
    blueprint = prepare(base, experts, config, on_meta=True)
    estimate = blueprint.estimate()
    build.build_folder(base, experts, config, tmp_path / "disk", progress=False)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(tmp_path / "disk").values())
    assert estimate.disk == stored
    assert estimate.tasks == 3
    assert estimate.parameters == sum(p.numel() for p in FAMILIES["bert"].make().parameters())
    assert estimate.experts == 3 * 4 * estimate.parameters
    assert estimate.memory > 7 * 4 * TEXT["vocab_size"] * TEXT["hidden_size"]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_build_says_what_it_needs_on_a_terminal(terminal, bert, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("retex_hf.utils.progress.shows_bars", lambda: terminal)
    build.build_folder(*bert, RetexConfig(rank=3), tmp_path / "disk")
    said = capsys.readouterr()
    assert said.out == ""
    assert (f"Building disk: {prepare(*bert, RetexConfig(rank=3)).estimate()}" in said.err) == terminal


# ---- interrupted -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch) -> list[str]:
    """The stages of the pieces of work that are done from now on."""
    stages: list[str] = []
    record = tensor_store.FolderStore.record

    def counting(self, stage, key, facts):
        stages.append(stage)
        record(self, stage, key, facts)

    monkeypatch.setattr(tensor_store.FolderStore, "record", counting)
    return stages


@pytest.mark.parametrize(
    ("name", "stage", "count"),
    [
        ("ties", "Merging", 5),
        ("della", "Merging", 5),
        ("affine", "Solving", 7),
        ("narrow", "Solving, pass 2", 4),
        ("int8", "Solving", 9),
        ("bytes", "Merging", 6),
        ("bytes", "Reading spectra", 6),
        ("bytes", "Solving", 9),
    ],
)
def test_killed_and_started_again_it_continues_to_the_same_bits(name, stage, count, bert, tmp_path, recorded):
    base, experts = bert
    target = tmp_path / "disk"
    config = RetexConfig(**CONFIGS[name])
    RetexModel.from_experts(base, experts, config, progress=False, output_dir=tmp_path / "whole")
    whole = list(recorded)
    recorded.clear()
    kill_build(base.parent, target, stage, count, CONFIGS[name])
    assert not target.exists()
    assert hidden(tmp_path) == sorted([interrupted_build(target).name, ".disk.building.lock"])
    RetexModel.from_experts(base, experts, config, progress=False, output_dir=target)
    earlier = list(dict.fromkeys(whole))[: list(dict.fromkeys(whole)).index(stage)]
    assert not set(recorded) & set(earlier)
    assert recorded.count(stage) == whole.count(stage) - count
    assert_same_artifact(target, tmp_path / "whole")
    assert hidden(tmp_path) == []


def test_merging_is_not_prepared_again_when_all_is_merged(bert, tmp_path, monkeypatch):
    base, experts = bert
    kill_build(base.parent, tmp_path / "disk", "Solving", 1, CONFIGS["ties"])
    monkeypatch.setattr(build, "get_merger", lambda *_: pytest.fail("everything is merged already"))
    RetexModel.from_experts(base, experts, RetexConfig(**CONFIGS["ties"]), progress=False, output_dir=tmp_path / "disk")


def interrupt(monkeypatch, error: type[BaseException], after: int = 6) -> None:
    calls = []
    solve = solver._solve_unit

    def failing(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise error("stop")
        return solve(*arguments)

    monkeypatch.setattr(tensor_store, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(solver, "_solve_unit", failing)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_interrupted_or_out_of_room_it_leaves_its_work(error, bert, tmp_path, monkeypatch, recorded):
    with monkeypatch.context() as patch:
        interrupt(patch, error)
        with pytest.raises(error):
            build.build_folder(*bert, RetexConfig(rank=3), tmp_path / "disk", progress=False)
    recorded.clear()
    build.build_folder(*bert, RetexConfig(rank=3), tmp_path / "disk", progress=False)
    assert "Merging" not in recorded and recorded


def test_any_other_failure_clears_up(bert, tmp_path, monkeypatch):
    interrupt(monkeypatch, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        build.build_folder(*bert, RetexConfig(rank=3), tmp_path / "disk", progress=False)
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("change", ["config", "expert", "shards", "asked"])
def test_an_interrupted_build_of_something_else_is_not_continued(change, bert, tmp_path, monkeypatch, recorded):
    base, experts = bert
    with monkeypatch.context() as patch:
        interrupt(patch, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            build.build_folder(base, experts, RetexConfig(rank=3), tmp_path / "disk", progress=False)
    config, options = RetexConfig(rank=3), {}
    if change == "config":
        config = RetexConfig(rank=4)
    elif change == "expert":
        perturb(BertModel.from_pretrained(experts["red"]), seed=9).save_pretrained(experts["red"])
    elif change == "shards":
        options = {"max_shard_size": "10KB"}
    else:
        options = {"resume": False}
    recorded.clear()
    build.build_folder(base, experts, config, tmp_path / "disk", progress=False, **options)
    again = list(recorded)
    recorded.clear()
    build.build_folder(base, experts, config, tmp_path / "afresh", progress=False, **options)
    assert again == recorded
    assert_same_artifact(tmp_path / "disk", tmp_path / "afresh")


def test_modules_in_memory_are_told_apart_by_their_values(bert, tmp_path, monkeypatch, recorded):
    base, folders = bert
    experts = {task: BertModel.from_pretrained(folder) for task, folder in folders.items()}

    def stopped() -> None:
        with monkeypatch.context() as patch:
            interrupt(patch, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                build.build_folder(base, experts, RetexConfig(rank=3), tmp_path / "disk", progress=False)
        recorded.clear()

    stopped()
    build.build_folder(base, experts, RetexConfig(rank=3), tmp_path / "disk", progress=False)
    assert "Merging" not in recorded
    stopped()
    with torch.no_grad():
        experts["red"].pooler.dense.bias[0] += 1
    build.build_folder(base, experts, RetexConfig(rank=3), tmp_path / "disk", progress=False)
    assert "Merging" in recorded


def test_killed_while_finishing_it_loses_no_foreign_file(bert, tmp_path):
    base, experts = bert
    target = tmp_path / "disk"
    target.mkdir()
    (target / "notes").mkdir()
    for name in ("a.txt", "b.txt"):
        (target / "notes" / name).write_text(name)
    kill_build(base.parent, target, "Solving", 3, {"rank": 3})
    half = interrupted_build(target) / "artifact" / "notes"
    half.mkdir()
    (half / "a.txt").write_text("half")
    (half.parent / "config.json").write_text("{")
    RetexModel.from_experts(base, experts, RetexConfig(rank=3), progress=False, output_dir=target)
    assert {path.name: path.read_text() for path in (target / "notes").iterdir()} == {
        "a.txt": "a.txt",
        "b.txt": "b.txt",
    }


# ---- memory and processes --------------------------------------------------------------------------------------------

MEASURED = """
    import json, sys, threading, time
    from pathlib import Path
    import torch
    from retex_hf import RetexConfig
    from retex_hf.build import build

    torch.set_num_threads(1)

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    start = anonymous()
    for config in json.loads(sys.argv[1]):
        for folder in map(Path, sys.argv[2:]):
            experts = {path.name: path for path in folder.iterdir() if path.name != "base"}
            peak, stop = 0, threading.Event()

            def watch():
                global peak
                while not stop.is_set():
                    peak = max(peak, anonymous())
                    time.sleep(0.001)

            watcher = threading.Thread(target=watch, daemon=True)
            watcher.start()
            build.build_folder(folder / "base", experts, RetexConfig(**config), "out", progress=False)
            stop.set()
            watcher.join()
            print(peak - start)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


# glibc keeps what was freed for later, more or less of it from run to run; what is held is to be measured.
FREED_AT_ONCE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def wide_experts(folder: Path, layers: int) -> str:
    """Few layers, wide ones: the largest matrices have 1024 x 256 numbers, 1 MB."""
    config = BertConfig(
        vocab_size=32, hidden_size=256, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=1024,
        max_position_embeddings=16,
    )  # fmt: skip
    base = BertModel(config).eval()
    base.save_pretrained(folder / "base")
    for task in TASKS:
        moved = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in base.state_dict().items()}
        base.save_pretrained(folder / task, state_dict=moved)
    return str(folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_depth(tmp_path):
    folders = [wide_experts(tmp_path / str(layers), layers) for layers in (1, 9)]
    configs = [{"rank": 8}, {"rank": "full", "feature_source": "pretrained"}]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), json.dumps(configs), *folders],
        cwd=tmp_path, env=environment() | FREED_AT_ONCE, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = [int(line) for line in done.stdout.splitlines()]
    # Eight more layers are 25 MB of merged weights, 76 MB of experts, and as much of differences kept whole.
    for shallow, deep in (peaks[:2], peaks[2:]):
        assert deep - shallow < 10e6
        assert deep < 300e6 + (len(TASKS) + 4) * 4 * 1024 * 256


TWO_PROCESSES = """
    import sys
    from pathlib import Path
    from accelerate import Accelerator
    import torch
    from retex_hf import RetexConfig, RetexModel

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    experts = {task: folder / task for task in ("red", "green", "blue")}
    for number, config in enumerate([{"rank": 3}, {"rank": 3, "task_embedding_dim": 1}, {"storage": 0.1}]):
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        model = RetexModel.from_experts(
            folder / "base", experts, RetexConfig(**config), accelerator=accelerator, progress=False,
            output_dir=f"{sys.argv[2]}-{number}",
        )
        assert model.tasks == ["red", "green", "blue"]
"""


def test_two_processes_build_what_one_builds(bert, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    done = subprocess.run(
        [
            sys.executable, *launcher(2), str(script), str(bert[0].parent), str(tmp_path / "two"),
        ],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for number, options in enumerate([{"rank": 3}, {"rank": 3, "task_embedding_dim": 1}, {"storage": 0.1}]):
        build.build_folder(*bert, RetexConfig(**options), tmp_path / "one", progress=False)
        assert_same_artifact(tmp_path / f"two-{number}", tmp_path / "one")
    assert hidden(tmp_path) == []
