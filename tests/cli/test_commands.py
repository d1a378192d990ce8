"""The command line as its users meet it: from experts to answers, one command after the other."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from classifiers import make_classifiers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retex_hf import RetexModel
from retex_hf.artifact.recipe import Recipe
from retex_hf.cli import COMMANDS, main
from retex_hf.data.datasets import load_inputs

WIDTHS = {"low": 2, "middle": 4, "high": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return make_classifiers(tmp_path_factory.mktemp("models"), WIDTHS)


def experts(folders: Path, *tasks: str) -> list[str]:
    return [part for task in tasks for part in ("--expert", f"{task}={folders / 'experts' / task}")]


def data(folders: Path, *tasks: str) -> list[str]:
    return [part for task in tasks for part in ("--data", f"{task}={folders / 'data' / task}")]


@pytest.fixture(scope="module")
def built(folders, tmp_path_factory) -> Path:
    """An artifact of two tasks, built and signed."""
    out = tmp_path_factory.mktemp("artifacts") / "two"
    build = ["build", "--base", str(folders / "base"), *experts(folders, "low", "high"), "--rank", "4"]
    assert main([*build, "--num-reference", "32", "--output-dir", str(out)]) == 0
    assert main(["sign", str(out), *data(folders, "low", "high")]) == 0
    return out


def files(folder: Path) -> dict[str, bytes]:
    """Everything but the card, which bears the folder's name."""
    found = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "README.md")
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def test_flags_reach_the_build(built):
    model = RetexModel.from_pretrained(built)
    assert model.tasks == ["low", "high"]
    assert (model.retex_config.rank, model.retex_config.num_reference) == (4, 32)
    assert model.signatures is not None
    assert model.recipe["config"] == {"rank": 4, "weighting": "tasks", "num_reference": 32}


def test_the_stored_recipe_gives_the_same_files(built, tmp_path, capsys):
    assert main(["build", str(built), "--output-dir", str(tmp_path / "again")]) == 0
    assert files(tmp_path / "again") == files(built)
    assert "not reproduced bit for bit" not in capsys.readouterr().out


def test_a_build_says_the_mean_of_the_errors_that_are_known(built, tmp_path, monkeypatch, capsys):
    model = RetexModel.from_pretrained(built)
    first, second, *others = model.recovery_errors
    model.recovery_errors = {first: 0.25, second: 0.5, **dict.fromkeys(others)}
    monkeypatch.setattr("retex_hf.cli.build.make", lambda *args, **options: model)
    assert main(["build", str(built), "--output-dir", str(tmp_path / "again")]) == 0
    assert "mean error over tensors 0.375" in capsys.readouterr().out


def test_the_stored_recipe_of_a_changed_artifact_gives_the_same_files(folders, built, tmp_path):
    middle = [str(folders / "experts" / "middle"), "--data", str(folders / "data" / "middle")]
    three = tmp_path / "three"
    assert main(["add-task", str(built), "middle", *middle, "--output-dir", str(three)]) == 0
    assert main(["remove-task", str(three), "low"]) == 0
    assert RetexModel.from_pretrained(three).tasks == ["high", "middle"]
    assert main(["sign", str(three), *data(folders, "high", "middle"), "--num-reference", "16"]) == 0
    assert main(["build", str(three), "--output-dir", str(tmp_path / "again")]) == 0
    assert files(tmp_path / "again") == files(three)


def test_tasks_that_joined_earlier_signatures_join_them_again(folders, tmp_path):
    """Built unsigned, signed after a task was added, joined by another, signed anew."""
    out, widths = tmp_path / "out", list(WIDTHS)
    assert main(["build", "--base", str(folders / "base"), *experts(folders, widths[0]), "--output-dir", str(out)]) == 0
    assert main(["add-task", str(out), widths[1], str(folders / "experts" / widths[1])]) == 0
    assert main(["sign", str(out), *data(folders, *widths[:2])]) == 0
    joining = [str(folders / "experts" / widths[2]), "--data", str(folders / "data" / widths[2])]
    assert main(["add-task", str(out), widths[2], *joining]) == 0
    assert main(["sign", str(out), *data(folders, *widths), "--seed", "1"]) == 0
    assert main(["sign", str(out), *data(folders, *widths), "--seed", "2"]) == 0
    kinds = [next(iter(change)) for change in Recipe.read(out / "retex_recipe.yaml").changes]
    assert kinds == ["add", "sign", "add", "sign"]  # of two signings in a row the second counts
    assert main(["build", str(out), "--output-dir", str(tmp_path / "again")]) == 0
    assert files(tmp_path / "again") == files(out)


def test_lines_of_progress_leave_standard_output_clean(folders, built, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(built, tmp_path / "it")
    commands = {
        "Reading spectra": ["inspect", str(out), "--spectra", "--json"],
        "Evaluating ReTeX": ["eval", str(out), *data(folders, "low", "high"), "--json"],
        "Reading reference inputs": ["sign", str(out), *data(folders, "low", "high")],
        "Solving": ["build", str(built), "--output-dir", str(tmp_path / "again")],
    }
    for seconds in (10, 0):
        monkeypatch.setattr("retex_hf.utils.progress.SECONDS_BETWEEN_LINES", seconds)
        for title, command in commands.items():
            assert main(command) == 0
            said = capsys.readouterr()
            assert title not in said.out and " elapsed" not in said.out
            assert (f"\n{title}" in f"\n{said.err}" and " elapsed" in said.err) == (seconds == 0)
            assert seconds == 0 or said.err == ""
            if "--json" in command:
                json.loads(said.out)


def test_a_recipe_says_what_it_cannot_repeat(built, tmp_path, capsys):
    model = RetexModel.from_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(built)
    batches = {task: [dict(tokenizer(["w1 w2", "w20"], return_tensors="pt", padding=True))] for task in model.tasks}
    model.fit_signatures(batches, progress=False)
    model.save_pretrained(tmp_path / "own")
    stored = Recipe.read(tmp_path / "own" / "retex_recipe.yaml")
    assert stored.unrecorded == ["fit signatures on batches in memory"]
    assert main(["build", str(tmp_path / "own"), "--output-dir", str(tmp_path / "again")]) == 0
    assert "fit signatures on batches in memory, which no recipe can repeat" in capsys.readouterr().out


TEXTS = ["w0 w1 w2", "w25 w26", "w3"]


@torch.no_grad()
def expected(built: Path) -> list[dict]:
    model, tokenizer = RetexModel.from_pretrained(built), AutoTokenizer.from_pretrained(built)
    return model.predict(**tokenizer(TEXTS, return_tensors="pt", padding=True))


def answers(text: str) -> list[tuple[str, str]]:
    return [(record["task"], record["answer"]) for record in map(json.loads, text.splitlines())]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("form", ["text", "txt", "jsonl", "stdin", "stdin-jsonl"])
def test_predict_reads_texts_from_everywhere(built, form, mark, tmp_path, monkeypatch, capsys):
    lines, rows = "\n".join(TEXTS) + "\n", "\n".join(json.dumps({"text": text, "id": 3}) for text in TEXTS)
    (tmp_path / "in.txt").write_text(mark + lines)
    (tmp_path / "in.jsonl").write_text(mark + rows)
    given = (mark + (rows if form == "stdin-jsonl" else lines)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    arguments = {
        "text": [part for text in TEXTS for part in ("--text", text)],
        "txt": [str(tmp_path / "in.txt")],
        "jsonl": [str(tmp_path / "in.jsonl"), "--input-column", "text"],
        "stdin": [],
        "stdin-jsonl": ["-"],
    }[form]
    assert main(["predict", str(built), *arguments]) == 0
    wanted = [(row["task"], row["label"]) for row in expected(built)]
    assert answers(capsys.readouterr().out) == wanted
    assert {task for task, _ in wanted} == {"low", "high"}


def test_predict_gives_scores_residuals_and_the_merged_answer(built, capsys):
    texts = [part for text in TEXTS for part in ("--text", text)]
    assert main(["predict", str(built), *texts, "--residuals", "--merged", "--batch-size", "2"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model, tokenizer = RetexModel.from_pretrained(built), AutoTokenizer.from_pretrained(built)
    for text, record, row in zip(TEXTS, records, expected(built), strict=True):
        assert record["input"] == text
        assert record["score"] == pytest.approx(row["score"], abs=1e-5)
        assert min(record["residuals"], key=record["residuals"].get) == record["task"]
        with model.disable_adapter():
            plain = model.predict(**tokenizer([text], return_tensors="pt"), task=record["task"])
        assert record["merged"] == plain[0]["label"]


def test_predict_takes_a_known_task_and_prints_a_table(built, capsys):
    texts = [part for text in TEXTS for part in ("--text", text)]
    assert main(["predict", str(built), *texts, "--task", "high", "--format", "table"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["input", "task", "answer", "score"]
    assert len(rows) == len(TEXTS) and all(" high  high-" in row for row in rows)


def test_inspect_tells_what_is_there(built, folders, capsys):
    assert main(["inspect", str(built), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {task: of["classes"] for task, of in found["tasks"].items()} == {
        task: [f"{task}-{index}" for index in range(WIDTHS[task])] for task in ("low", "high")
    }
    model = RetexModel.from_pretrained(built)
    assert found["layers"].keys() == set(model.recovery)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    layer = found["layers"][name]
    offsets = torch.stack([model.recovery.offset(name, row) for row in model.recovery.task_embedding]).double()
    assert layer["energy"] == pytest.approx(float(offsets.square().sum()), rel=1e-5)
    assert layer["task_energy"]["high"] == pytest.approx(float(offsets[1].square().sum()), rel=1e-5)
    energies = torch.linalg.svdvals(offsets.flatten(0, 1)).square()
    assert layer["directions"] == int((energies.cumsum(0) / energies.sum() < 0.9).sum()) + 1
    assert layer["rank"] == 4 and layer["error"] == pytest.approx(model.recovery_errors[name])
    stored = sum(parameter.numel() * parameter.element_size() for parameter in model.recovery.parameters())
    assert found["storage_bytes"]["recovery"] == stored
    assert found["recipe"]["base"] == str(folders / "base")
    assert main(["inspect", str(built)]) == 0
    text = capsys.readouterr().out
    assert "low" in text and "attention.self.query.weight" in text and "rank: 4" in text


def test_eval_keeps_its_figures_in_the_artifact_and_on_the_card(folders, tmp_path, capsys):
    out = tmp_path / "artifact"
    build = ["build", "--base", str(folders / "base"), *experts(folders, "low", "high"), *data(folders, "low", "high")]
    assert main([*build, "--rank", "full", "--output-dir", str(out)]) == 0
    capsys.readouterr()
    assert (
        main(["eval", str(out), "--trust-recipe", "--individual", "--json", "--results-dir", str(tmp_path / "results")])
        == 0
    )
    figures = json.loads(capsys.readouterr().out)
    known = {name: of["modes"]["known"]["accuracy"] for name, of in figures["methods"].items()}
    assert known["ReTeX"] == known["individual"]  # rank full: the experts themselves
    assert RetexModel.from_pretrained(out).evaluation == figures
    assert json.loads((tmp_path / "results" / "results.json").read_text()) == figures
    identified = figures["methods"]["ReTeX"]["modes"]["unknown"]["identification"]["mean"]["value"]
    assert identified > 0.8
    assert f"{100 * identified:.1f}" in (out / "README.md").read_text()


def test_an_unsigned_artifact_is_evaluated_with_the_task_unknown_too(folders, tmp_path, capsys):
    out = str(tmp_path / "unsigned")
    build = ["build", "--base", str(folders / "base"), *experts(folders, "low", "high"), "--rank", "4"]
    assert main([*build, "--output-dir", out]) == 0
    capsys.readouterr()
    assert main(["eval", out, *data(folders, "low", "high"), "--no-save", "--json"]) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert set(methods["ReTeX"]["modes"]) == {"known", "unknown", "oracle"}


def test_data_of_the_recipe_are_read_as_it_says(folders, built, tmp_path, capsys):
    """Another signing or an evaluation on the recipe's own data needs none of its options again."""
    for task in ("low", "high"):
        for split in ("train", "test"):
            rows = [json.loads(row) for row in (folders / "data" / task / f"{split}.jsonl").read_text().splitlines()]
            renamed = [json.dumps({"a": row["text"], "b": "w1", "label": row["label"]}) for row in rows]
            (tmp_path / task).mkdir(exist_ok=True)
            (tmp_path / task / f"{split}.jsonl").write_text("\n".join(renamed))
    own = [part for task in ("low", "high") for part in ("--data", f"{task}={tmp_path / task}")]
    out = str(tmp_path / "out")
    options = ["--input-column", "Q: {a} {b}", "--max-length", "8", "--seed", "3"]
    assert main(["sign", str(built), *own, *options, "--output-dir", out]) == 0
    first = RetexModel.from_pretrained(out)
    assert first.recipe["input_column"] == "Q: {a} {b}"
    assert main(["sign", out, "--trust-recipe"]) == 0
    second = RetexModel.from_pretrained(out)
    assert second.recipe == first.recipe
    assert torch.equal(second.signatures.mean, first.signatures.mean)
    assert main(["eval", out, "--trust-recipe", "--rows", "4"]) == 0
    assert main(["sign", str(built), *own, "--input-column", "[a, b]", "--output-dir", out]) == 0
    assert RetexModel.from_pretrained(out).recipe["input_column"] == ["a", "b"]


@pytest.mark.parametrize("named", ["org/private-data", "{home}/.ssh/id_ed25519", "/etc/passwd"])
def test_what_an_untrusted_recipe_names_is_neither_fetched_nor_read(
    named, folders, built, tmp_path, capsys, monkeypatch
):
    """Without the caller's word no command asks the Hub, or opens a file, because an artifact says so."""
    artifact = tmp_path / "artifact"
    shutil.copytree(built, artifact)
    named = named.format(home=tmp_path)
    recipe = yaml.safe_load((artifact / "retex_recipe.yaml").read_text())
    recipe |= {"data": {"low": named, "high": named}, "base": named, "experts": {"low": named, "high": named}}
    (artifact / "retex_recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["verify", str(artifact), "--record"]) == 0
    asked: list[str] = []
    for module in ("retex_hf.cli.evaluate.load_task", "retex_hf.workflows.signing.load_inputs"):
        monkeypatch.setattr(module, lambda task, source, **options: asked.append(str(source)) or pytest.fail("read"))
    monkeypatch.setattr("retex_hf.cli.evaluate.evaluate_model", lambda *given, **options: asked.append("evaluated"))
    capsys.readouterr()
    own = data(folders, "low", "high")
    for command in (["eval"], ["eval", "--no-save", "--json"], ["sign"], ["eval", *own, "--individual"]):
        assert main([command[0], str(artifact), *command[1:]]) == 2
        error = capsys.readouterr().err
        assert named in error and "pass --trust-recipe if you trust its author" in error and error.count("\n") == 1
    half = [*own, "--individual", *(f"--expert={task}={folders / 'experts' / task}" for task in ("low", "high"))]
    assert main(["eval", str(artifact), *half]) == 2
    assert f"base: {named!r}" in capsys.readouterr().err
    assert asked == []
    with pytest.raises(pytest.fail.Exception):
        main(["sign", str(artifact), "--trust-recipe"])
    assert asked == [named]


def test_lines_of_pairs_are_pairs_in_every_command(built, tmp_path, capsys):
    (tmp_path / "pairs.txt").write_text("\ufeffw1\tw2\r\nw3\x0bw4\tw5\n")
    assert load_inputs("low", tmp_path / "pairs.txt") == [("w1", "w2"), ("w3\x0bw4", "w5")]
    shown = []
    for source in ([str(tmp_path / "pairs.txt")], ["--text", "w1\tw2", "--text", "w3\x0bw4\tw5"]):
        assert main(["predict", str(built), *source]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and '"input": "w1 | w2"' in shown[0]


@torch.no_grad()
def test_an_exported_task_is_a_plain_checkpoint(built, tmp_path):
    assert main(["export", str(built), "high", str(tmp_path / "high")]) == 0
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "high").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path / "high")(TEXTS, return_tensors="pt", padding=True)
    wanted = RetexModel.from_pretrained(built)(**inputs, task="high").logits
    torch.testing.assert_close(plain(**inputs).logits, wanted)
    assert plain.config.id2label == {index: f"high-{index}" for index in range(3)}
    assert not list((tmp_path / "high").glob("retex_*"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_examples(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"retex {command}" in text.partition("examples:")[2]


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert main([]) == 2


def test_a_reader_that_leaves_is_no_error(built, tmp_path):
    (tmp_path / "many.txt").write_text("\n".join(TEXTS * 200))
    command = f"{sys.executable} -m retex_hf.cli predict {built} {tmp_path / 'many.txt'} --batch-size 4 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""
