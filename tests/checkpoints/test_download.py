"""Hub ids through the real client, against a Hub that answers from memory."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
import torch
import writers
from families import FAMILIES
from helpers import assert_same
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from retex_hf import CheckpointError
from retex_hf.checkpoints import open_source

COMMIT = "c" * 40
NOT_READ = {"consolidated.safetensors", "onnx/model.safetensors", "model.onnx", "training_args.bin", "modeling.py"}


class Hub:
    """One repository, `org/model`, with the files of a folder and some that a build does not need."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.files |= dict.fromkeys(NOT_READ, b"not to be read")
        self.fetched: set[str] = set()

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path == "/api/models/org/model/revision/main":
            return httpx2.Response(200, json={"id": "org/model", "sha": COMMIT, "siblings": []})
        if path == f"/api/models/org/model/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{index:040x}"}
                for index, (name, content) in enumerate(self.files.items())
            ]
            return httpx2.Response(200, json=entries)
        if path.startswith(f"/org/model/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/org/model/resolve/{COMMIT}/")
            content = self.files[name]
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}
            if request.method == "HEAD":
                return httpx2.Response(200, headers=headers)
            self.fetched.add(name)
            return httpx2.Response(200, headers=headers, content=content)
        code = "RevisionNotFound" if path.startswith("/api/models/org/model/revision/") else "RepoNotFound"
        return httpx2.Response(404, headers={"X-Error-Code": code}, json={"error": "not found"})


@pytest.fixture
def serve(monkeypatch):
    def start(hub: Hub) -> Hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(hub), follow_redirects=True))
        return hub

    yield start
    set_client_factory(default_client_factory)


@pytest.mark.parametrize(
    ("write", "weights"),
    [
        (writers.folder, {"model.safetensors"}),
        (writers.bin_folder, {"pytorch_model.bin"}),
    ],
    ids=["safetensors", "bin"],
)
def test_only_what_a_build_reads_is_fetched(serve, write, weights, tmp_path):
    model = FAMILIES["bert"].make()
    hub = serve(Hub(write(model, tmp_path / "model")))
    source = open_source("org/model", "the base", cache_dir=str(tmp_path / "cache"))
    assert source.provenance == {"source": "hub", "id": "org/model", "revision": COMMIT}
    assert hub.fetched == weights | {"config.json"}
    assert_same({name: source.read(name) for name in source.infos}, dict(model.state_dict()), exact=True)


def test_shards_are_all_fetched(serve, tmp_path):
    torch.manual_seed(0)
    model = FAMILIES["bert"].make()
    hub = serve(Hub(writers.sharded(model, tmp_path / "model")))
    source = open_source("org/model", "the base", cache_dir=str(tmp_path / "cache"))
    assert set(source.infos) == set(model.state_dict())
    assert hub.fetched == set(hub.files) - NOT_READ


@pytest.mark.parametrize(
    ("spec", "reason"), [("org/nothing", "404|Repository Not Found"), ("org/model@v9", "404|Revision Not Found")]
)
def test_what_the_hub_does_not_have_is_one_sentence(serve, spec, reason, tmp_path):
    serve(Hub(writers.folder(FAMILIES["bert"].make(), tmp_path / "model")))
    with pytest.raises(CheckpointError, match=f"^expert 'red': .* and the Hub says: .*({reason})") as caught:
        open_source(spec, "expert 'red'", cache_dir=str(tmp_path / "cache"))
    assert "\n" not in str(caught.value)
