"""A token is sent to the Hub, and appears nowhere else: in no file, no output, no log, no error and no traceback."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hubs import connect
from huggingface_hub import HfApi, constants
from local_hub import LocalHub
from trust.subjects import bert, make_artifact, make_tokenizer

from retex_hf import RetexConfig, RetexError, RetexModel
from retex_hf.artifact import hub as retex_hub
from retex_hf.cli import main
from retex_hf.utils.hub_errors import without_secrets

SECRET = "hf_MarkerThatMustNotShow0123456789"
READS = "hf_MarkerThatOnlyReads0123456789"
MARKER = "Marker"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with LocalHub(tmp_path / "hub", tokens={SECRET: "write", READS: "read"}) as hub:
        connect(hub.endpoint, monkeypatch, tmp_path)
        monkeypatch.setattr("retex_hf.artifact.card.writing.DRAWN", {})
        yield hub


@pytest.fixture
def said(caplog, capfd):
    """Everything that was printed or logged, at every level."""
    caplog.set_level(logging.DEBUG)

    def read() -> str:
        out, err = capfd.readouterr()
        return "\n".join([out, err, caplog.text, *(str(vars(record)) for record in caplog.records)])

    return read


def files_with(marker: str, *folders: Path) -> list[str]:
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            if marker in str(path) or (path.is_file() and marker.encode() in path.read_bytes()):
                found.append(str(path))
    return found


def test_the_search_finds_a_token(tmp_path, said):
    (tmp_path / "file").write_bytes(b"\0" + SECRET.encode())
    logging.getLogger("x").debug(SECRET)
    assert files_with(MARKER, tmp_path) and MARKER in said()


def test_a_whole_life_without_a_trace(hub, tmp_path, said):
    """Built from the Hub, saved, pushed, brought up to date, loaded again."""
    base, experts = bert(make_tokenizer())
    for name, model in {"base": base, **experts}.items():
        model.save_pretrained(tmp_path / name)
        api, repo = HfApi(token=SECRET), f"me/{name}"
        api.create_repo(repo, private=True)
        api.upload_folder(repo_id=repo, folder_path=tmp_path / name)
    cache = {"token": SECRET, "cache_dir": str(tmp_path / "cache")}
    sources = {task: f"me/{task}" for task in experts}
    model = RetexModel.from_experts(
        "me/base", sources, RetexConfig(rank=2), progress=True, check_base=False, output_dir=tmp_path / "built", **cache
    )
    model.save_pretrained(tmp_path / "saved")
    model.push_to_hub("me/retex", private=True, token=SECRET)
    loaded = RetexModel.from_pretrained("me/retex", **cache)
    loaded.create_or_update_model_card(tmp_path / "saved")
    loaded.push_to_hub("me/retex", token=SECRET)
    assert SECRET not in repr(loaded) and SECRET not in str(loaded.recipe) and SECRET not in str(vars(loaded))
    assert MARKER not in said()
    assert files_with(MARKER, tmp_path) == []


def test_commands_without_a_trace(hub, tmp_path, monkeypatch, said):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = str(make_artifact(tmp_path / "artifact"))
    assert main(["push", folder, "me/retex", "--private"]) == 0
    assert main(["inspect", "me/retex", "--json"]) == 0
    monkeypatch.setenv("HF_TOKEN", READS)
    assert main(["push", folder, "me/retex"]) == 2
    assert main(["push", folder, "no such/id/at all"]) == 2
    assert main(["predict", "me/nothing", "--text", "sky"]) == 2
    assert MARKER not in said()
    assert files_with(MARKER, tmp_path) == []


def failures(model: RetexModel, monkeypatch: pytest.MonkeyPatch, cache: str) -> dict[str, Callable[[], Any]]:
    def break_off(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"PUT https://user:{SECRET}@store/x?token={SECRET} failed")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"README.md: {SECRET} is not a licence")

    def push(commit: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(HfApi, "create_commit", commit)
                retex_hub.push(lambda folder, repo_id: None, "me/x", token=SECRET)

        return call

    return {
        "not allowed": lambda: model.push_to_hub("me/x", token=READS),
        "unknown": lambda: model.push_to_hub("me/x", token=SECRET + "x"),
        "no header": lambda: model.push_to_hub("me/x", token=SECRET + "\n"),
        "breaks off": push(break_off),
        "card refused": push(refuse),
        "not there": lambda: RetexModel.from_pretrained("me/nothing", token=SECRET, cache_dir=cache),
        "load without header": lambda: RetexModel.from_pretrained("me/nothing", token=SECRET + "\n", cache_dir=cache),
        "a base that is not there": lambda: RetexModel.from_experts("me/nothing", {"a": "me/b"}, token=SECRET),
        "a base at an address": lambda: RetexModel.from_experts(f"https://me:{SECRET}@hub/a", {"a": "me/b"}),
        "an expert at an address": lambda: RetexModel.from_experts("me/b", {"a": f"https://me:{SECRET}@hub/a"}),
        "an artifact at an address": lambda: RetexModel.from_pretrained(f"https://me:{SECRET}@hub/a"),
        "a repository at an address": lambda: model.push_to_hub(f"https://me:{SECRET}@hub/a"),
    }


def test_every_failure_without_a_trace(hub, tmp_path, monkeypatch, said):
    model = RetexModel.from_pretrained(make_artifact(tmp_path / "artifact"))
    for name, call in failures(model, monkeypatch, str(tmp_path / "cache")).items():
        with pytest.raises(RetexError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value))
        shown = shown.replace(Path(__file__).read_text(encoding="utf-8"), "")
        assert MARKER not in str(caught.value), name
        assert "\n" not in str(caught.value), name
        assert SECRET not in shown, name
    assert MARKER not in said()
    assert files_with(MARKER, tmp_path) == []


def test_an_endpoint_with_a_password(tmp_path, monkeypatch, said):
    with LocalHub(tmp_path / "hub") as hub:
        endpoint = hub.endpoint
    connect(endpoint.replace("://", f"://me:{SECRET}@"), monkeypatch, tmp_path)
    model = RetexModel.from_pretrained(make_artifact(tmp_path / "artifact"))
    for call in (
        lambda: model.push_to_hub("me/x"),
        lambda: RetexModel.from_pretrained("me/x", cache_dir=tmp_path / "cache"),
        lambda: RetexModel.from_experts("me/x", {"a": "me/x"}, cache_dir=str(tmp_path / "cache")),
    ):
        with pytest.raises(RetexError, match=r"the Hub at http://\*\*\*@127\.0\.0\.1:\d+ cannot be reached") as caught:
            call()
        assert MARKER not in str(caught.value)
    assert main(["push", str(tmp_path / "artifact"), "me/x"]) == 2
    assert MARKER not in said()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a {SECRET} b", "a *** b"),
        ("git+https://me:word@hub/x and http://you@hub", "git+https://***@hub/x and http://***@hub"),
        ("mail me@hub.example, 1@2", "mail me@hub.example, 1@2"),
        ("https://hub/owner@revision", "https://hub/owner@revision"),
    ],
)
def test_what_is_hidden_in_a_text(text, shown):
    assert without_secrets(text, SECRET) == shown
