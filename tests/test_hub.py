"""A whole round trip through the real Hub client, against a Hub that lives in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import httpx2
import pytest
import torch
from families import TEXT, tokens
from helpers import TASKS, assert_same, make_experts
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils._http import default_client_factory
from transformers import AutoModel, BertConfig, BertModel

from retex_hf import ArtifactError, RetexConfig, RetexModel


class Hub:
    """Repositories as {id: {file: content}}; answers what `create_repo`, `upload_folder` and downloads ask."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.visibility: dict[str, str | None] = {}
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.tokens.add(request.headers.get("authorization"))
        path = request.url.path
        if path == "/api/repos/create":
            return self._create(json.loads(request.content))
        if path == "/api/validate-yaml":
            return httpx2.Response(200, json={"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(org/[\w-]+)(?:/(\w+)/(.+))?", path):
            return self._api(match[1], match[2] or "revision", request)
        if match := re.fullmatch(r"/(org/[\w-]+)/resolve/(\w+)/(.+)", path):
            return self._resolve(match[1], match[3], request.method)
        return httpx2.Response(404, json={"error": path})

    def _create(self, values: dict) -> httpx2.Response:
        repo = f"{values['organization']}/{values['name']}"
        self.repos.setdefault(repo, {".gitattributes": b""})
        self.visibility[repo] = values.get("visibility")
        return httpx2.Response(200, json={"url": f"{constants.ENDPOINT}/{repo}", "name": repo, "id": repo})

    def _sha(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()

    def _api(self, repo: str, verb: str, request: httpx2.Request) -> httpx2.Response:
        if repo not in self.repos:
            return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"}, json={"error": "no such repository"})
        if verb == "preupload":
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for f in json.loads(request.content)["files"]]  # fmt: skip
            return httpx2.Response(200, json={"files": files})
        if verb == "commit":
            for line in request.content.splitlines():
                entry = json.loads(line)
                if entry["key"] == "header":
                    self.messages.append(entry["value"]["summary"])
                elif entry["key"] == "file":
                    self.repos[repo][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"{constants.ENDPOINT}/{repo}/commit/{self._sha(repo)}"
            return httpx2.Response(200, json={"commitUrl": url, "commitOid": self._sha(repo), "success": True})
        if verb == "tree":
            entries = [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                       for name, content in self.repos[repo].items()]  # fmt: skip
            return httpx2.Response(200, json=entries)
        siblings = [{"rfilename": name} for name in self.repos[repo]]
        return httpx2.Response(200, json={"id": repo, "sha": self._sha(repo), "siblings": siblings, "private": False})

    def _resolve(self, repo: str, name: str, method: str) -> httpx2.Response:
        content = self.repos.get(repo, {}).get(name)
        if content is None:
            return httpx2.Response(404, headers={"X-Error-Code": "EntryNotFound"}, json={"error": "no such file"})
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self._sha(repo)}
        headers["Content-Length"] = str(len(content))
        return httpx2.Response(200, headers=headers, content=b"" if method == "HEAD" else content)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(hub), follow_redirects=True))
    yield hub
    set_client_factory(default_client_factory)


@pytest.fixture
def model() -> RetexModel:
    base = BertModel(BertConfig(**TEXT)).eval()
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=3), progress=False)
    model.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
    return model


@torch.no_grad()
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_pushed_and_pulled_it_answers_the_same(hub, model, tmp_path, shard_size):
    info = model.push_to_hub(
        "org/retex-bert", private=True, token="hf_secret", commit_message="first", max_shard_size=shard_size
    )
    assert info.oid == hub._sha("org/retex-bert")
    assert hub.visibility == {"org/retex-bert": "private"}
    assert hub.messages == ["first"]
    assert "Bearer hf_secret" in hub.tokens
    assert not any(b"hf_secret" in content for content in hub.repos["org/retex-bert"].values())
    loaded = RetexModel.from_pretrained("org/retex-bert", cache_dir=tmp_path, token="hf_secret")
    inputs = tokens(6)
    assert_same(loaded(**inputs), model(**inputs), exact=True)
    with model.disable_adapter():
        plain = AutoModel.from_pretrained("org/retex-bert", cache_dir=tmp_path / "plain").eval()
        assert_same(plain(**inputs), model(**inputs), exact=True)


def test_a_repository_without_a_file_is_refused(hub, model, tmp_path):
    model.push_to_hub("org/retex-bert")
    del hub.repos["org/retex-bert"]["retex_recovery.safetensors"]
    with pytest.raises(ArtifactError, match="retex_recovery"):
        RetexModel.from_pretrained("org/retex-bert", cache_dir=tmp_path)


def test_an_unknown_repository_is_refused(hub, tmp_path):
    with pytest.raises(ArtifactError, match="org/nothing"):
        RetexModel.from_pretrained("org/nothing", cache_dir=tmp_path)


def test_offline_pushing_says_so(model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineModeIsEnabled):
        model.push_to_hub("org/retex-bert")
