"""Whole round trips through the real Hub client, over HTTP, against a Hub in a folder."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import local_hub
import pytest
import torch
from families import TEXT, tokens
from helpers import TASKS, assert_same, make_experts
from hubs import READ, WRITE, connect, serving
from huggingface_hub import HfApi, ModelCard, constants
from local_hub import LocalHub
from transformers import AutoModel, BertConfig, BertModel

from retex_hf import ArtifactError, ConfigError, HubError, RetexConfig, RetexModel
from retex_hf.artifact import hub as retex_hub

REPO = "org/retex-bert"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving(tmp_path / "hub", monkeypatch) as hub:
        yield hub


@pytest.fixture
def model() -> RetexModel:
    return make_model()


def make_model(rank: int = 3, base: BertModel | None = None) -> RetexModel:
    base = base or BertModel(BertConfig(**TEXT)).eval()
    model = RetexModel.from_experts(base, make_experts(base), RetexConfig(rank=rank), progress=False)
    model.fit_signatures({task: [tokens(8)] for task in TASKS}, progress=False)
    return model


@pytest.fixture
def quick(monkeypatch):
    """Cards without their figures, which take most of the time of a push."""
    monkeypatch.setattr("retex_hf.artifact.card.writing.DRAWN", {})


@pytest.mark.parametrize(
    "name",
    ["../x.json", "a/../../x.json", "/tmp/x.json", "..\\x.json", "a\0.json", f"{'x' * 300}.json", "\udcff.json"],
    ids=ascii,
)
def test_names_that_no_file_may_have_are_refused(hub, tmp_path, name):
    hub.put(REPO, {"config.json": b"{}", name: b"{}"})
    cache = tmp_path / "a" / "cache"
    for load in (
        lambda: RetexModel.from_pretrained(REPO, cache_dir=cache),
        lambda: RetexModel.from_experts(REPO, {task: REPO for task in TASKS}, cache_dir=cache),
    ):
        with pytest.raises(HubError, match=f"{REPO}' lists a file with a name that cannot be stored here: .*[.]$"):
            load()
    assert not list(tmp_path.glob("a/**/*x.json"))


# ---- there and back --------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_pushed_and_pulled_it_answers_the_same(hub, model, tmp_path, shard_size):
    repo = f"{REPO}-{shard_size}"  # transformers remembers which commit a name stood for
    info = model.push_to_hub(repo, private=True, token=WRITE, commit_message="first", max_shard_size=shard_size)
    repository = hub.repository(repo)
    assert info.oid == repository.resolve("main")
    assert repository.private
    assert hub.messages(repo) == ["initial commit", "first"]
    files = hub.files(repo)
    assert any(name.startswith("model-00002") for name in files) == (shard_size == "20KB")
    assert {"README.md", "figures/errors.png", "retex_config.json"} <= set(files)
    assert not any(WRITE.encode() in content or str(tmp_path).encode() in content for content in files.values())
    loaded = RetexModel.from_pretrained(repo, cache_dir=tmp_path / "cache", token=READ)
    inputs = tokens(6)
    assert_same(loaded(**inputs), model(**inputs), exact=True)
    with model.disable_adapter():
        plain = AutoModel.from_pretrained(repo, cache_dir=tmp_path / "plain", token=READ).eval()
        assert_same(plain(**inputs), model(**inputs), exact=True)


def test_the_hub_can_name_the_library_and_count_downloads(hub, quick, model, tmp_path):
    model.push_to_hub(REPO, token=WRITE)
    assert ModelCard(hub.files(REPO)["README.md"].decode()).data.library_name == "retex-hf"

    def downloads(load) -> int:
        hub.requests.clear()
        load()
        return sum(method == "GET" and path.endswith("/retex_config.json") for method, path in hub.requests)

    assert downloads(lambda: RetexModel.from_pretrained(REPO, cache_dir=tmp_path / "cache")) == 1
    assert downloads(lambda: AutoModel.from_pretrained(REPO, cache_dir=tmp_path / "plain")) == 0


@torch.no_grad()
def test_revisions_hold_their_own_weights(hub, quick, tmp_path):
    base = BertModel(BertConfig(**TEXT)).eval()
    first, second, inputs = make_model(1, base), make_model(5, base), tokens(6)
    oldest = first.push_to_hub(REPO, token=WRITE)
    branched = second.push_to_hub(REPO, token=WRITE, revision="release/2")
    newest = second.push_to_hub(REPO, token=WRITE)
    assert oldest.oid != newest.oid
    assert hub.repository(REPO).refs == {"main": newest.oid, "release/2": branched.oid}
    expected = {oldest.oid: first, branched.oid: second, "release/2": second, "main": second, None: second}
    for revision, model in expected.items():
        loaded = RetexModel.from_pretrained(REPO, revision=revision, cache_dir=tmp_path / "cache")
        assert_same(loaded(**inputs, task="red"), model(**inputs, task="red"), exact=True)
    with pytest.raises(HubError, match=r"'org/retex-bert', .* has no such revision \(404\)\.$"):
        RetexModel.from_pretrained(REPO, revision="release/3", cache_dir=tmp_path / "cache")


@torch.no_grad()
def test_a_pull_request_leaves_main_alone(hub, quick, model, tmp_path):
    hub.put(REPO, {"notes.txt": b"mine"})
    info = model.push_to_hub(REPO, token=WRITE, create_pr=True)
    assert info.pr_url == f"{hub.endpoint}/{REPO}/discussions/1"
    assert set(hub.files(REPO)) == {".gitattributes", "notes.txt"}
    loaded = RetexModel.from_pretrained(REPO, revision=info.pr_revision, cache_dir=tmp_path / "cache")
    inputs = tokens(4)
    assert_same(loaded(**inputs), model(**inputs), exact=True)
    model.push_to_hub(REPO, token=WRITE, revision=info.pr_revision, commit_message="again", max_shard_size="20KB")
    assert hub.messages(REPO, info.pr_revision)[-1] == "again"
    with pytest.raises(ConfigError, match="leave out revision='release/2'"):
        model.push_to_hub(REPO, token=WRITE, create_pr=True, revision="release/2")


def test_a_push_replaces_the_artifact_and_nothing_else(hub, quick, model):
    model.push_to_hub(REPO, token=WRITE, max_shard_size="10KB")
    shards = {name for name in hub.files(REPO) if "-of-" in name or name.endswith(".index.json")}
    assert len(shards) > 4
    own = {"notes.txt": b"mine", "data/model.safetensors": b"theirs", "figures/photo.png": b"a picture"}
    hub.put(REPO, own)
    model.push_to_hub(REPO, token=WRITE, commit_message="smaller")
    files = hub.files(REPO)
    assert not shards & set(files)
    assert {"model.safetensors", "retex_recovery.safetensors"} <= set(files)
    assert own.items() <= files.items()
    assert hub.messages(REPO)[-2:] == ["put", "smaller"]


def test_a_card_on_the_hub_is_brought_up_to_date(hub, quick, model):
    model.push_to_hub(REPO, token=WRITE)
    card = hub.files(REPO)["README.md"].decode()
    assert f'RetexModel.from_pretrained("{REPO}")' in card
    edited = card.replace("Say here what the model is for", "It sorts mail. It").replace(
        "tags:\n", "license: mit\ntags:\n"
    )
    hub.put(REPO, {"README.md": edited.encode()})
    model.retex_config = replace(model.retex_config, temperature=2.0, signatures="inputs")
    model.signatures = None
    model.push_to_hub(REPO, token=WRITE)
    card = hub.files(REPO)["README.md"].decode()
    assert "It sorts mail." in card and "license: mit\n" in card
    assert "No signatures" in card and "Signatures that tell tasks apart" not in card


def test_the_card_that_a_person_changed_last_is_pushed(hub, quick, model, tmp_path, caplog):
    folder = tmp_path / "artifact"
    model.save_pretrained(folder)

    def push(local: tuple[str, str] | None = None, web: tuple[str, str] | None = None) -> str:
        if local:
            text = (folder / "README.md").read_text()
            assert local[0] in text
            (folder / "README.md").write_text(text.replace(*local))
        if web:
            text = hub.files(REPO)["README.md"].decode()
            assert web[0] in text
            hub.put(REPO, {"README.md": text.replace(*web).encode()})
        RetexModel.from_pretrained(folder).push_to_hub(REPO, token=WRITE)
        return hub.files(REPO)["README.md"].decode()

    assert "Say here what the model is for" in push()
    assert "One." in push(local=("Say here what the model is for", "One."))
    RetexModel.from_pretrained(folder).save_pretrained(folder)  # which is no push
    assert "Two." in push(local=("One.", "Two."))
    assert "license: mit" in push(local=("tags:\n", "license: mit\ntags:\n"))
    assert "Three." in push(web=("Two.", "Three."))
    assert "Three." in push()  # nobody wrote anything here since
    assert "both edited" not in caplog.text
    card = push(local=("Two.", "Here."), web=("Three.", "There."))
    assert "There." in card and "Here." not in card
    assert "both edited" in caplog.text
    caplog.clear()
    (folder / "README.md").write_text(card)
    assert "Four." in push(local=("There.", "Four."))
    assert "both edited" not in caplog.text


def test_a_change_by_someone_else_is_not_overwritten(hub, model):
    hub.put(REPO, {"README.md": b"# Mine\n"})

    def write(folder: Path, repo_id: str) -> None:
        (folder / "README.md").write_text("# Ours\n")
        hub.put(REPO, {"README.md": b"# Mine, and better\n"})

    with pytest.raises(HubError, match="changed by someone else meanwhile"):
        retex_hub.push(write, REPO, token=WRITE)
    assert hub.files(REPO)["README.md"] == b"# Mine, and better\n"


def test_metadata_that_the_hub_refuses_are_one_sentence(hub, tmp_path):
    def write(folder: Path, repo_id: str) -> None:
        (folder / "README.md").write_text("---\n- a\n- list\n---\n")

    with pytest.raises(
        HubError, match=r"^Cannot push to 'org/retex-bert': Invalid metadata in README.md.*not a mapping$"
    ):
        retex_hub.push(write, REPO, token=WRITE)


@torch.no_grad()
def test_provenance_survives_with_its_commits(hub, quick, tmp_path):
    base = BertModel(BertConfig(**TEXT)).eval()
    commits = {}
    for name, module in {"base": base, **make_experts(base)}.items():
        module.save_pretrained(tmp_path / name)
        (tmp_path / name / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
        commits[name] = hub.put(f"org/{name}", tmp_path / name)
    hub.put("org/base", {"notes.txt": b"later"})
    experts = {task: f"org/{task}" for task in TASKS}
    cache = str(tmp_path / "cache")
    built = RetexModel.from_experts(
        f"org/base@{commits['base']}", experts, RetexConfig(rank=3), cache_dir=cache, progress=False
    )
    built.push_to_hub(REPO, token=WRITE)
    loaded = RetexModel.from_pretrained(REPO, cache_dir=cache)
    assert loaded.retex_config.base_model == {"source": "hub", "id": "org/base", "revision": commits["base"]}
    assert loaded.retex_config.experts == {
        task: {"source": "hub", "id": f"org/{task}", "revision": commits[task]} for task in TASKS
    }
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert card.data.base_model == ["org/base", *(f"org/{task}" for task in TASKS)]
    assert card.data.base_model_relation == "merge"
    assert card.data.license == "apache-2.0"
    assert all(commit in card.text for commit in commits.values())


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_private_repository_needs_the_token(hub, quick, model, tmp_path):
    model.push_to_hub(REPO, private=True, token=WRITE)
    for token, reason in (
        (None, r"may see \(401\).*hf auth login"),
        ("hf_unknown", r"does not know the token.*\(401\)"),
    ):
        with pytest.raises(HubError, match=reason) as caught:
            RetexModel.from_pretrained(REPO, token=token, cache_dir=tmp_path / "cache")
        assert one_sentence(caught) and "hf_unknown" not in str(caught.value)
    assert RetexModel.from_pretrained(REPO, token=READ, cache_dir=tmp_path / "cache").tasks == TASKS


@pytest.mark.parametrize(
    ("repo_id", "token", "reason"),
    [
        (REPO, None, r"needs one \(401\): log in"),
        (REPO, "hf_unknown", r"does not know the token, or needs one \(401\)"),
        (REPO, READ, r"no permission for that at org/retex-bert \(403\)"),
        ("org/a/b", WRITE, "'org/a/b' is not a repository id"),
        ("org/..", WRITE, "'org/..' is not a repository id"),
    ],
)
def test_a_refused_push_is_one_sentence_without_the_token(hub, model, repo_id, token, reason):
    with pytest.raises(HubError, match=rf"^Cannot push to '{repo_id}': .*{reason}") as caught:
        model.push_to_hub(repo_id, token=token)
    assert one_sentence(caught)
    assert token is None or token.strip() not in str(caught.value)
    assert not list(hub.folder.glob("*/*/repo.json"))


def test_a_token_that_cannot_be_sent_is_refused_unseen(hub, model):
    with pytest.raises(HubError, match=r"^The token holds blanks, line breaks or other characters") as caught:
        model.push_to_hub(REPO, token="hf_secret\n")
    assert "hf_secret" not in str(caught.value) and hub.requests == []


def test_a_transfer_that_breaks_off_is_one_sentence(hub, monkeypatch):
    def break_off(*args, **kwargs):
        raise RuntimeError("connection reset\nby peer")

    monkeypatch.setattr(HfApi, "create_commit", break_off)
    with pytest.raises(
        HubError, match=r"^Cannot push to 'org/retex-bert': the upload was interrupted: connection reset$"
    ):
        retex_hub.push(lambda folder, repo_id: None, REPO, token=WRITE)


def one_sentence(caught: pytest.ExceptionInfo) -> bool:
    text = str(caught.value)
    return (
        "\n" not in text and text.endswith(".") and caught.value.__cause__ is None and caught.value.__suppress_context__
    )


def test_a_public_repository_does_not_become_private_unnoticed(hub, model):
    hub.put(REPO, {"notes.txt": b"mine"})
    with pytest.raises(HubError, match="exists already, and is public"):
        model.push_to_hub(REPO, private=True, token=WRITE)
    assert set(hub.files(REPO)) == {".gitattributes", "notes.txt"}


def test_a_repository_without_a_file_is_refused(hub, quick, model, tmp_path):
    model.push_to_hub(REPO, token=WRITE)
    hub.put(REPO, {"retex_recovery.safetensors": None})
    with pytest.raises(ArtifactError, match="retex_recovery"):
        RetexModel.from_pretrained(REPO, cache_dir=tmp_path)
    hub.put(REPO, {"retex_config.json": None})
    with pytest.raises(ArtifactError, match=r"org/retex-bert is not a ReTeX artifact: it has no retex_config\.json"):
        RetexModel.from_pretrained(REPO, cache_dir=tmp_path)


def test_an_unknown_repository_is_refused(hub, tmp_path):
    for token, status in ((None, 401), (READ, 404)):
        with pytest.raises(HubError, match=rf"^Cannot load 'org/nothing', .*may see \({status}\)") as caught:
            RetexModel.from_pretrained("org/nothing", token=token, cache_dir=tmp_path)
        assert one_sentence(caught)
    with pytest.raises(HubError, match="'no such/repo/id' is not a repository id"):
        RetexModel.from_pretrained("no such/repo/id", cache_dir=tmp_path)


@torch.no_grad()
def test_offline_the_cache_serves(hub, quick, model, tmp_path, monkeypatch):
    model.push_to_hub(REPO, token=WRITE)
    cache, inputs = tmp_path / "cache", tokens(4)
    RetexModel.from_pretrained(REPO, cache_dir=cache)
    hub.requests.clear()
    loaded = RetexModel.from_pretrained(REPO, cache_dir=cache, local_files_only=True)
    assert_same(loaded(**inputs), model(**inputs), exact=True)
    with pytest.raises(HubError, match=r"the Hub is not asked .* nothing of it is in the local cache") as caught:
        RetexModel.from_pretrained(REPO, cache_dir=tmp_path / "other", local_files_only=True)
    assert one_sentence(caught)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = RetexModel.from_pretrained(REPO, cache_dir=cache)
    assert_same(loaded(**inputs), model(**inputs), exact=True)
    with pytest.raises(HubError, match="nothing of it is in the local cache"):
        RetexModel.from_pretrained("org/nothing", cache_dir=cache)
    assert hub.requests == []
    with pytest.raises(HubError, match=r"^Cannot push to 'org/retex-bert': offline mode is on \(HF_HUB_OFFLINE\)\.$"):
        model.push_to_hub(REPO, token=WRITE)


def test_a_hub_out_of_reach_is_named(model, tmp_path, monkeypatch):
    with LocalHub(tmp_path) as hub:
        endpoint = hub.endpoint
    connect(endpoint, monkeypatch, tmp_path)
    for call in (
        lambda: model.push_to_hub(REPO, token=WRITE),
        lambda: RetexModel.from_pretrained(REPO, cache_dir=tmp_path / "cache"),
    ):
        with pytest.raises(HubError, match=f"the Hub at {endpoint} cannot be reached") as caught:
            call()
        assert one_sentence(caught)


def test_the_dtype_has_two_names(hub, quick, model, tmp_path):
    model.push_to_hub(REPO, token=WRITE)
    cache = {"cache_dir": tmp_path / "cache"}
    for options in (
        {"torch_dtype": torch.bfloat16},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": torch.bfloat16},
    ):
        assert RetexModel.from_pretrained(REPO, **cache, **options).dtype == torch.bfloat16
    assert RetexModel.from_pretrained(REPO, **cache, torch_dtype="auto").dtype == torch.float32
    with pytest.raises(ConfigError, match="two names for one setting"):
        RetexModel.from_pretrained(REPO, **cache, dtype=torch.float16, torch_dtype="bfloat16")
    for wrong in ("int8", "half a byte", 3):
        with pytest.raises(ConfigError, match="torch_dtype must be a floating-point dtype"):
            RetexModel.from_pretrained(REPO, **cache, torch_dtype=wrong)


# ---- the local Hub itself --------------------------------------------------------------------------------------------


def test_the_local_hub_keeps_its_folder(tmp_path):
    folder = tmp_path / "hub"
    with LocalHub(folder) as hub:
        commit = hub.put(REPO, {"a.txt": b"0123456789"})
    with LocalHub(folder) as hub:
        assert hub.repository(REPO).resolve("main") == commit
        request = urllib.request.Request(f"{hub.endpoint}/{REPO}/resolve/main/a.txt", headers={"Range": "bytes=2-4"})
        with urllib.request.urlopen(request) as answer:
            assert (answer.status, answer.read()) == (206, b"234")
            assert answer.headers["Content-Range"] == "bytes 2-4/10"
            assert answer.headers["X-Repo-Commit"] == commit


def test_the_local_hub_runs_as_a_script(tmp_path, monkeypatch):
    command = [sys.executable, local_hub.__file__, str(tmp_path / "hub"), "--port", "0", "--token", "hf_mine"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        endpoint = said.partition("HF_ENDPOINT=")[2].split()[0]
        assert said.endswith("HF_TOKEN=hf_mine\n")
        connect(endpoint, monkeypatch, tmp_path)
        api = HfApi(endpoint=endpoint, token="hf_mine")
        assert api.whoami()["name"] == "me"
        assert api.create_repo("mine").repo_id == "me/mine"
        api.upload_file(path_or_fileobj=b"text", path_in_repo="sub/a.txt", repo_id="me/mine")
        path = api.hf_hub_download("me/mine", "sub/a.txt", cache_dir=tmp_path / "cache")
        assert Path(path).read_bytes() == b"text"
    finally:
        process.terminate()
        process.wait(10)
