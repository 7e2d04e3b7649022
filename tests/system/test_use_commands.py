"""predict, calibrate and export as a person uses them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedshot.cli.main import main
from fedshot.runs.experiment import Experiment
from use.test_inputs import texts  # noqa: F401  (a fixture)

from .runs import finished, stopped

PROTO: dict[str, Any] = {
    "method": {"name": "fl_proto", "local_steps": 2},
    "split": {"base": ["0-4"], "validation": ["5-7"], "novel": ["8", "9"]},
    "test": {"way": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return finished(tmp_path_factory.mktemp("runs") / "run", PROTO)


@pytest.fixture
def folders(run: Experiment, tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder of digits 8 and 9 to learn from, and one of twelve to answer."""
    data = run.prepared.dataset
    support, query = tmp_path / "support", tmp_path / "query"
    (query / "below").mkdir(parents=True)
    for c in (8, 9):
        (support / f"digit {c}").mkdir(parents=True)
        for i, row in enumerate(data.images_of([c])[:11]):
            image = Image.fromarray(data.pixels[row][..., 0])
            place = support / f"digit {c}" if i < 5 else query / ("below" if i < 8 else ".")
            image.save(place / f"{c}-{i}.png")
    return support, query


def predict(run: Experiment, folders: tuple[Path, Path], *more: object) -> int:
    support, query = folders
    words = ["predict", run.folder, "--support", support, "--query", query, *more]
    return main([str(word) for word in words])


def test_a_table_of_answers(
    run: Experiment, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(run, folders) == 0
    out, err = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 12
    assert list(rows[0]) == ["file", "label", "confidence", "p(digit 8)", "p(digit 9)"]
    right = [row["label"] == f"digit {Path(row['file']).name[0]}" for row in rows]
    assert np.mean(right) > 0.7
    assert {"below/8-5.png", "8-8.png"} <= {row["file"] for row in rows}
    for row in rows:
        p = [float(row["p(digit 8)"]), float(row["p(digit 9)"])]
        assert float(row["confidence"]) == max(p)
        assert sum(p) == pytest.approx(1, abs=2e-6)
    assert "12 files classified; learnt from 10 files of 2 classes" in err


def test_a_run_that_has_not_finished_is_told(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = stopped(tmp_path / "half", 0, PROTO)
    assert predict(made, folders) == 0
    err = capsys.readouterr().err
    assert f"{made.folder} has trained 0 of 4 rounds\n" in err
    assert f"{made.folder} predicts with the model of round 0, before training\n" in err


def test_json_lines_into_a_file_and_nothing_else_when_quiet(
    run: Experiment, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(run, folders, "--json", "--to", tmp_path / "out.jsonl", "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 12
    assert rows[0]["probabilities"][rows[0]["label"]] == rows[0]["confidence"]


def test_files_that_cannot_be_read_are_skipped_and_counted(
    run: Experiment, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    support, query = folders
    (query / "cut.png").write_bytes((query / "8-8.png").read_bytes()[:60])
    (query / "empty.jpg").write_bytes(b"")
    (query / "notes.doc").write_bytes(b"not asked about")
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)).save(query / "deep.png")
    (tmp_path / "secret.png").write_bytes((query / "8-8.png").read_bytes())
    (query / "link.png").symlink_to(tmp_path / "secret.png")
    (query / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    (query / "inside.png").symlink_to(query / "8-8.png")
    (support / "digit 8" / "bad.png").write_bytes(b"nothing")
    page = tmp_path / "page.html"
    assert predict(run, folders, "--page", page) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + 13
    assert "13 files classified, 5 skipped, 1 file of other kinds left out (.doc 1), 1" in err
    assert "folder not followed; learnt from 10 files of 2 classes (1 of the examples" in err
    for words in ("cut.png cannot", "empty.jpg cannot", "deep.png has pixels of mode I;16",
                  "link.png is a link out of its folder", "bad.png cannot"):  # fmt: skip
        assert f"{words}" in err
    assert "notes.doc" not in err
    assert "secret" not in out
    text = page.read_text(encoding="utf-8")
    assert "Could not be read" in text
    assert "mode I;16, deeper than 8 bits" in text
    assert str(query) not in text


def test_a_page_holds_all_its_pictures_and_escapes_names(
    run: Experiment, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, query = folders
    (query / "8-8.png").rename(query / "<script>alert(1)<&.png")
    assert predict(run, folders, "--page", tmp_path / "below" / "page.html") == 0
    text = (tmp_path / "below" / "page.html").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 12 + 10
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;&amp;.png" in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert "default-src 'none'" in text
    assert str(tmp_path) not in text
    assert "wrote" in capsys.readouterr().err
    assert predict(run, folders, "--page", tmp_path) == 2
    out, err = capsys.readouterr()
    assert f"--page is {tmp_path}, which is a folder" in err
    assert not out  # nothing is answered in vain


def test_none_of_these_needs_a_calibration_and_then_turns_away(
    run: Experiment, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(run, folders, "--none-of-these", "0.05") == 2
    err = capsys.readouterr().err
    assert "--none-of-these is 0.05, which needs a calibration. Run `fedshot calibrate" in err
    assert "leave calibrated on" not in err
    data = run.prepared.dataset
    for i, row in enumerate(data.images_of([0])[:20]):
        Image.fromarray(data.pixels[row][..., 0]).save(folders[1] / f"zero-{i}.png")
    words = ["calibrate", str(run.folder), "--shot", "5", "--episodes", "40"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"expected calibration error [\d.]+ % before, [\d.]+ % after", out)
    assert "none of these at 5 %: accepts" in out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["asked"] for one in found["unknown"]][:3] == [0.01, 0.02, 0.05]
    page = tmp_path / "page.html"
    assert predict(run, folders, "--none-of-these", "0.05", "--json", "--page", page) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    turned = [row for row in rows if row["label"] == "none of these"]
    assert turned
    assert sum("zero" in row["file"] for row in turned) / len(turned) > 0.5
    assert f"{len(turned)} look like none of them" in page.read_text(encoding="utf-8")
    (run.folder / "calibration.json").unlink()


def test_texts_in_files_are_answered(
    texts: tuple[Experiment, list[str]], tmp_path: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made, said = texts
    for label, first in (("ships", 24), ("tools", 8)):
        (tmp_path / "support" / label).mkdir(parents=True)
        for i in range(2):
            place = tmp_path / "support" / label / f"{i}.txt"
            place.write_text(said[first + i], encoding="utf-8")
    (tmp_path / "query").mkdir()
    for i in range(3):
        (tmp_path / "query" / f"{i}.txt").write_text(said[26 + i], encoding="utf-8")
    (tmp_path / "query" / "blank.txt").write_text(" \n", encoding="utf-8")
    page = tmp_path / "page.html"
    assert predict(made, (tmp_path / "support", tmp_path / "query"), "--page", page) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4
    assert "blank.txt has no words" in err
    assert "3 files classified, 1 skipped" in err
    assert said[26] in page.read_text(encoding="utf-8")


def test_texts_in_tables_are_answered_by_line(
    texts: tuple[Experiment, list[str]], tmp_path: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made, said = texts
    support, query, page = tmp_path / "support.tsv", tmp_path / "q.jsonl", tmp_path / "page.html"
    rows = [("ships", said[24]), ("tools", said[8]), ("ships", said[25]), ("tools", said[9])]
    lines = [f"{label}\t{text}" for label, text in rows]
    support.write_text("\n".join(["label\ttext", *lines]), encoding="utf-8")
    asked = [said[26], "", None, said[27]]
    query.write_text("".join(json.dumps({"text": t}) + "\n" for t in asked), encoding="utf-8")
    assert predict(made, (support, query), "--page", page) == 0
    out, err = capsys.readouterr()
    assert [row["file"] for row in csv.DictReader(io.StringIO(out))] == [
        "q.jsonl, line 1", "q.jsonl, line 4",
    ]  # fmt: skip
    assert "q.jsonl, line 2 has no words" in err
    assert "q.jsonl, line 3: 'text' is of type NoneType; expected a text" in err
    assert "2 texts classified, 2 skipped; learnt from 4 texts of 2 classes" in err
    shown = page.read_text(encoding="utf-8")
    assert said[26] in shown
    assert said[24] in shown
    assert str(tmp_path) not in shown
    whole = support.read_text(encoding="utf-8")
    support.write_text(f"{whole}\nplants\t\n", encoding="utf-8")
    assert predict(made, (support, query)) == 2
    assert (
        "no text of class 'plants' that can be read. Add some, or remove" in capsys.readouterr().err
    )
    support.write_text(whole, encoding="utf-8")
    folder = tmp_path / "support"  # the same examples in files give the same answers
    for i, (label, text) in enumerate(rows):
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{i}.txt").write_text(text, encoding="utf-8")
    assert predict(made, (folder, query)) == 0
    assert capsys.readouterr().out == out
    assert predict(made, (folder, query.rename(tmp_path / "q.xlsx"))) == 2
    assert "q.xlsx is neither a folder nor a table of texts; expected a file that ends in .csv" in (
        capsys.readouterr().err
    )


def test_what_lies_beside_the_classes_is_counted_and_spellings_are_refused(
    run: Experiment, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    support, query = folders
    (support / "beside.png").write_bytes((query / "8-8.png").read_bytes())
    assert predict(run, folders) == 0
    assert "12 files classified, 1 file beside the class folders left" in capsys.readouterr().err
    (support / "digit 8 ").mkdir()
    (support / "digit 8 " / "1.png").write_bytes((query / "8-8.png").read_bytes())
    assert predict(run, folders) == 2
    assert "'digit 8' and 'digit 8 ' differ only in whitespace" in capsys.readouterr().err


def test_what_cannot_be_done_is_refused_with_code_2(
    run: Experiment, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    support, query = folders
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "cat").mkdir(parents=True)
    (tmp_path / "one" / "cat").mkdir(parents=True)
    (tmp_path / "one" / "cat" / "1.png").write_bytes((query / "8-8.png").read_bytes())
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "cat").symlink_to(support / "digit 8", target_is_directory=True)
    for (s, q), told in (
        ((tmp_path / "no", query), "no is not a folder"),
        ((tmp_path / "empty", query), "empty holds no folders; expected one folder for each class"),
        ((tmp_path / "half", query), "half/cat holds no picture that can be read"),
        ((tmp_path / "one", query), "all of one class, 'cat'"),
        ((tmp_path / "linked", query), "cat is a link to"),
        ((support, tmp_path / "empty"), "empty holds no picture that can be read"),
        ((support, tmp_path / "no"), "no is not a folder"),
    ):
        assert predict(run, (s, q)) == 2
        out, err = capsys.readouterr()
        assert told in err
        assert "Traceback" not in err
        assert out == ""
    assert predict(run, folders, "--client", "0") == 2
    assert "keep no models" in capsys.readouterr().err
    assert predict(run, folders, "--client", "-1") == 2
    assert "client is '-1'; the clients of this run are" in capsys.readouterr().err
    assert predict(run, folders, "--none-of-these", "7") == 2
    assert "expected a share between 0 and 1" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "no")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_an_export_is_written_into_the_run_or_elsewhere(
    run: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(run.folder), "--to", "safetensors"]
    assert main(words) == 0
    assert (run.folder / "export" / "encoder.safetensors").exists()
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "out"), "--licence", "ours"]) == 0
    written = capsys.readouterr().out.split()
    assert {Path(path).name for path in written} == {
        "encoder.safetensors", "encoder.json", "README.md",
    }  # fmt: skip
    assert "Licence of the data: ours." in (tmp_path / "out" / "README.md").read_text("utf-8")
