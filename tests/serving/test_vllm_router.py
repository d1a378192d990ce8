"""The router of the vLLM plugin decides as `RetexModel.identify` does, without the libraries that build a model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from decoders import saved_decoder
from signed import make_tokenizer, references

from retex_hf import RetexModel
from retex_hf.errors import ArtifactError, InputError
from retex_hf.serving.vllm.exported import read_exported
from retex_hf.serving.vllm.launch import arguments, environment, why_not
from retex_hf.serving.vllm.micro_batches import MicroBatches
from retex_hf.serving.vllm.router import Router, load_trunk

# Prompts of different lengths: of one task each, of two, and of none.
TEXTS = [
    "rose cherry",
    "grass leaf moss lime fern olive",
    "sky",
    "ice azure navy",
    "poppy wine rose ruby brick blood sunset",
    "rose grass sky",
    "jade jade",
    "[UNK] [UNK] [UNK]",
    "cobalt mint",
]


def prompts() -> list[list[int]]:
    return make_tokenizer()(TEXTS)["input_ids"]


def exported(folder: Path, kind: str = "llama", **options) -> RetexModel:
    model = saved_decoder(folder, kind, **options)
    model.export_vllm(folder)
    return model


def assert_as_identified(model: RetexModel, folder: Path) -> None:
    """Decisions agree with those on the same rows, one by one, with left padding in between."""
    router = Router(read_exported(folder))
    found, alone = router(prompts()), [router([prompt])[0] for prompt in prompts()]
    for row, prompt in enumerate(prompts()):
        routing = model.identify(input_ids=torch.tensor([prompt]))
        task = int(routing.task_ids[0])
        for decision in (found[row], alone[row]):
            assert decision.task == routing.tasks[0]
            assert decision.probability == pytest.approx(routing.probabilities[0, task].item(), abs=1e-3)
            assert decision.residual == pytest.approx(routing.residuals[0, task].item(), rel=1e-3)
            assert decision.abstained == (routing.abstained is not None and bool(routing.abstained[0]))
            assert decision.model == (None if decision.abstained else decision.task)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"identification": "residual", "feature_layer": 1}),
        ("llama", {"identification": "residual", "feature_pooling": "last", "feature_layer": -1}),
        ("llama", {"routing": {"method": "hard", "far": "merged", "quantile": 0.5}}),
        ("llama", {"feature_source": "pretrained"}),
        ("llama", {"temperature": 3.0, "feature_layer": "model.layers.1.mlp", "identification": "residual"}),
        ("qwen3", {}),
        ("classifier", {}),
    ],
)
def test_decides_as_identify(kind, options, tmp_path):
    model = exported(tmp_path / "retex", kind, **options)
    assert_as_identified(model, tmp_path / "retex")
    decisions = Router(read_exported(tmp_path / "retex"))(prompts())
    assert [one.task for one in decisions[:5]] == ["red", "green", "blue", "blue", "red"]
    assert any(one.abstained for one in decisions) == ("routing" in options)


def test_reads_no_block_beyond_the_feature_layer(tmp_path):
    exported(tmp_path / "retex", identification="residual", feature_layer=0)
    trunk, names = load_trunk(tmp_path / "retex", ["model.layers.0"])
    assert names == ["layers.0"] and len(trunk.layers) == 1


def test_signatures_fitted_again_are_used(tmp_path):
    """The export stays, because the weights are the same; the router reads what is now stored."""
    folder = tmp_path / "retex"
    model = exported(folder)
    of_task = references(make_tokenizer())
    shifted = {"red": of_task["green"], "green": of_task["blue"], "blue": of_task["red"]}
    model.fit_signatures(shifted, progress=False)
    model.save_description(folder)
    assert [one.task for one in Router(read_exported(folder))(prompts()[:3])] == ["blue", "red", "green"]


def test_refusals(tmp_path):
    folder = tmp_path / "retex"
    saved_decoder(folder)
    with pytest.raises(ArtifactError, match=r"has no retex_vllm.json: run `retex export"):
        read_exported(folder)
    assert "has no retex_vllm.json" in (why_not(folder) or "")
    RetexModel.from_pretrained(folder).export_vllm(folder)
    assert why_not(folder) is None
    with pytest.raises(InputError, match="Prompt 1 has no tokens"):
        Router(read_exported(folder))([[4], []])
    for name in ("retex_vllm.json", "retex_signatures.safetensors", "retex_config.json"):
        content = (folder / name).read_bytes()
        changed = content.replace(b'"temperature": null', b'"temperature": 9.0') if name == "retex_config.json" else b""
        (folder / name).write_bytes(changed)
        assert changed != content
        with pytest.raises(ArtifactError, match=name):
            read_exported(folder)
        (folder / name).write_bytes(content)
    read_exported(folder)


# ---- environment -----------------------------------------------------------------------------------------------------

BLOCKED = ("accelerate", "peft", "open_clip", "datasets", "evaluate", "timm", "diffusers", "matplotlib", "torchvision")


def test_needs_none_of_the_libraries_that_build(tmp_path):
    """vLLM's environment has torch, transformers and safetensors."""
    exported(tmp_path / "retex")
    script = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
import retex_hf.serving.vllm.launch
from retex_hf.serving.vllm import RetexPlugin
from retex_hf.serving.vllm.exported import read_exported
from retex_hf.serving.vllm.router import Router
from pathlib import Path
print([one.task for one in Router(read_exported(Path({str(tmp_path / "retex")!r})))({prompts()!r})])
"""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([one.task for one in Router(read_exported(tmp_path / "retex"))(prompts())])


class Options:
    host, port, api_key = "0.0.0.0", 8765, "secret"


def test_command_line_of_vllm(tmp_path):
    exported(tmp_path / "retex", "classifier")
    given = arguments(read_exported(tmp_path / "retex"), Options())
    text = " ".join(given)
    assert given[:2] == ["serve", str(tmp_path / "retex")] and "secret" not in text
    for flags in ("--dtype float32", "--max-lora-rank 8", "--max-loras 4", "--port 8765", "--max-lora-cls-labels 4"):
        assert flags in text
    modules = [json.loads(item) for item in given[given.index("--lora-modules") + 1 :]]
    assert [module["name"] for module in modules] == ["red", "green", "blue"]
    assert all((Path(module["path"]) / "adapter_model.safetensors").is_file() for module in modules)
    found = environment(Options(), {"VLLM_PLUGINS": "mine", "HOME": "/"})
    assert found == {"VLLM_PLUGINS": "mine,retex", "HOME": "/", "VLLM_API_KEY": "secret"}


# ---- concurrent requests ---------------------------------------------------------------------------------------------


def test_requests_that_wait_share_a_call():
    calls, first = [], threading.Event()

    def double(items):
        calls.append(list(items))
        if len(calls) == 1:
            first.wait(10)
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]

    async def run():
        route = MicroBatches(double)
        tasks = [asyncio.create_task(route([index])) for index in range(3)]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(route(items)) for items in ([20, 21], [13], [22])]
        await asyncio.sleep(0.05)
        tasks[5].cancel()
        first.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(run())
    assert found[:4] == [[0], [2], [4], [40, 42]]
    assert isinstance(found[4], ValueError) and isinstance(found[5], asyncio.CancelledError)
    assert calls[0] == [0, 1, 2] and calls[1] == [20, 21, 13] and calls[2:] == [[20, 21], [13]]
