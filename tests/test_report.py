"""The report: what it copies, what it shows, what must hold, and what it refuses to read."""

import copy
import json
import os
import re

import pytest

RESULTS = {
    "ttft": {
        "runs": [{"ttft_ms": 90.0 + n, "total_ms": 300.0 + n, "tokens": 31} for n in range(5)],
        "ttft_p50": 92.0,
        "total_p50": 302.0,
    },
    "prefill": [
        {"docs": 0, "prompt_n": 35, "prompt_ms": 91.0, "ttft_ms": 98.25},
        {"docs": 4, "prompt_n": 473, "prompt_ms": 1314.0, "ttft_ms": 1317.5},
        {"docs": 12, "prompt_n": 1290, "prompt_ms": 4298.0, "ttft_ms": 4303.75},
    ],
    "cache": {
        "first": {"prompt_n": 1486, "ttft_ms": 5280.0},
        "second": {"prompt_n": 1, "ttft_ms": 25.5},
        "changed_prefix": {"prompt_n": 1499, "ttft_ms": 5400.0},
    },
    "sentence": {
        "ttft_ms": 75.0,
        "first_sentence_ms": 217.0,
        "total_ms": 966.0,
        "first_sentence": "Eat nothing.",
        "text": "Eat nothing. Drink water.",
    },
    "cancel": {"max_tokens": 256, "received_tokens": 52, "closed_at_ms": 501.0, "slot_idle_after_ms": 16.5},
}
PROPS = {
    "model_path": "/models/small-model.gguf",
    "default_generation_settings": {"n_ctx": 4096},
    "total_slots": 1,
    "build_info": "b11434",
}
RELATIONS = 18
SCRIPT = {name: f"measure_{name}.py" for name in RESULTS}


@pytest.fixture
def results(lab):
    """The results of a good run, to be changed and written."""
    lab.out.mkdir()
    lab.env["COLUMNS"] = "80"
    return copy.deepcopy(RESULTS)


def write(folder, results, **more):
    folder.mkdir(exist_ok=True)
    for name, content in {**results, **more}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")


def set_key(results, path, value):
    """Change one value, or take it away with DELETE; a path such as "ttft runs 0 ttft_ms"."""
    *way, last = [int(key) if key.isdigit() else key for key in path.split()]
    for key in way:
        results = results[key]
    if value is DELETE:
        del results[last]
    else:
        results[last] = value


DELETE = object()


def test_report_json_has_the_seven_figures_copied(lab, results):
    write(lab.out, results)
    process = lab.good("report.py")
    assert lab.read("report.json") == {
        "ttft_p50_ms": 92.0,
        "total_p50_ms": 302.0,
        "ttft_12docs_ms": 4303.75,
        "prompt_n_12docs": 1290,
        "cache_ttft_ms": 25.5,
        "first_sentence_ms": 217.0,
        "cancel_idle_ms": 16.5,
    }
    assert process.err == ""
    assert process.out.rstrip().endswith(str(lab.out / "report.json"))


# ---------------------------------------------------------------------------- the picture


def test_the_picture_shows_each_time_with_a_bar_and_its_words_on_80_columns(lab, results):
    write(lab.out, results, props=PROPS)
    out = lab.good("report.py").out
    assert "small-model.gguf, context 4096, slots 1, build b11434" in out
    assert re.search(r"first token +92\.0 ms ▏ +short prompt: p50 of 5, 90\.0 to 94\.0\n", out)
    assert re.search(r"first token, 0 docs +98\.2 ms ▏ +35 tokens at 2\.60 ms, prefill 93%\n", out)
    assert re.search(r"first token, 12 docs +4303\.8 ms █+.? +1290 tokens at 3\.33 ms, prefill 100%\n", out)
    assert re.search(r"cache, same again +25\.5 ms ▏ +1 token computed \(first: 1486\)\n", out)
    assert re.search(r"cache, time in front +5400\.0 ms █{8} +1499 tokens computed \(first: 1486\)\n", out)
    assert re.search(r"first sentence +217\.0 ms .+speech starts; 142\.0 after first token\n", out)
    assert re.search(r"stop after hang-up +16\.5 ms ▏ +closed at 501\.0, 52 fragments received\n", out)
    assert "time at end" not in out
    assert "during prefill" not in out
    assert "UNSTEADY" not in out


def test_bars_are_on_one_scale(lab, results):
    results["prefill"][1]["ttft_ms"] = 2700.0  # half of the longest
    write(lab.out, results)
    lab.env["COLUMNS"] = "200"
    out = lab.good("report.py").out
    assert re.search(r"4 docs +2700\.0 ms █{12} ", out)
    assert re.search(r"time in front +5400\.0 ms █{24} ", out)


@pytest.mark.parametrize("columns", [1, 40, 60, 80, 100, 250])
def test_the_picture_fits_the_width_of_the_terminal(lab, results, columns):
    results["ttft"]["runs"][0]["ttft_ms"] = 1.0
    write(lab.out, results, props={**PROPS, "model_path": "a rather long name of a model with words in it"})
    lab.env["COLUMNS"] = str(columns)
    picture = lab.good("report.py").out.partition("\n\n")[0].splitlines()
    assert len(picture) > 10
    assert max(map(len, picture)) <= max(columns, 40)


def test_bars_are_hash_marks_where_the_encoding_has_no_blocks(lab, results):
    write(lab.out, results)
    lab.env["PYTHONIOENCODING"] = "ascii"
    out = lab.good("report.py").out
    assert out.isascii()
    assert re.search(r"time in front +5400\.0 ms #{8} ", out)


def test_runs_that_spread_more_than_twofold_are_marked_as_unsteady(lab, results):
    set_key(results, "ttft runs 4 ttft_ms", 181.0)
    write(lab.out, results)
    lab.env["COLUMNS"] = "200"
    out = lab.good("report.py").out
    assert re.search(r"first token .*90\.0 to 181\.0, UNSTEADY", out)
    assert out.count("UNSTEADY") == 1
    set_key(results, "ttft runs 4 ttft_ms", 179.0)
    write(lab.out, results)
    assert "UNSTEADY" not in lab.good("report.py").out


def test_the_two_experiments_past_the_lab_are_shown_where_they_are_there(lab, results):
    results["cache"]["changed_suffix"] = {"prompt_n": 30, "ttft_ms": 234.0}
    early = {"docs": 14, "received_tokens": 0, "closed_at_ms": 103.0, "slot_idle_after_ms": 5892.0}
    write(lab.out, results, cancel_prefill=early)
    out = lab.good("report.py").out
    assert re.search(r"cache, time at end +234\.0 ms .* 30 tokens computed \(first: 1486\)\n", out)
    assert re.search(r"stop during prefill +5892\.0 ms █{8} closed at 103\.0, prompt of 14 docs\n", out)


def test_files_of_different_runs_are_asked_about(lab, results):
    write(lab.out, results)
    assert "of one run?" not in lab.good("report.py").out
    then = (lab.out / "cancel.json").stat().st_mtime - 3600
    os.utime(lab.out / "cache.json", (then, then))
    assert "cache.json is 60 minutes older than " in lab.good("report.py").out


def test_a_model_that_props_does_not_name_is_no_failure(lab, results):
    for props in [], {}, {"default_generation_settings": 5, "model_path": "\x1b[2Jx"}:
        write(lab.out, results, props=props)
        process = lab.run("report.py")
        assert process.returncode == (1 if props == [] else 0)
        assert "\x1b" not in process.out


# ---------------------------------------------------------------------------- what must hold


def test_every_relation_is_a_line_with_its_two_figures_and_ok(lab, results):
    write(lab.out, results)
    lines = [line for line in lab.good("report.py").out.splitlines() if line.startswith(("ok ", "FAILS "))]
    assert len(lines) == RELATIONS
    assert all(re.fullmatch(r"ok     .+ [\d.]+ (<|<=|==) [\d.]+", line) for line in lines)


BROKEN = [
    ("ttft runs 3 ttft_ms", 303.0, "the first token comes before the end", "303 < 303"),
    ("prefill 0 prompt_n", 473, "4 documents are more tokens", "473 < 473"),
    ("prefill 1 prompt_n", 1290, "12 documents are more tokens", "1290 < 1290"),
    ("prefill 0 ttft_ms", 1317.5, "4 documents delay", "1317.5 < 1317.5"),
    ("prefill 2 ttft_ms", 1317.5, "12 documents delay", "1317.5 < 1317.5"),
    ("prefill 0 prompt_ms", 98.26, "no documents: prefill is over", "98.26 <= 98.25"),
    ("prefill 1 prompt_ms", 1318, "4 documents: prefill is over", "1318 <= 1317.5"),
    ("prefill 2 prompt_ms", 4304, "12 documents: prefill is over", "4304 <= 4303.75"),
    ("cache second prompt_n", 1486, "a hit computes fewer", "1486 < 1486"),
    ("cache second ttft_ms", 5280.0, "a hit is faster", "5280 < 5280"),
    ("cache changed_prefix prompt_n", 1337, "0.9 of first", "1337.4 <= 1337"),
    ("cache changed_prefix ttft_ms", 25.5, "slower than a hit", "25.5 < 25.5"),
    ("sentence ttft_ms", 218.0, "first token, then first sentence", "218 <= 217"),
    ("sentence total_ms", 216.0, "first sentence, then the end", "217 <= 216"),
    ("sentence text", "Drink water.", "starts with the sentence", "0 == 12"),
    ("cancel received_tokens", 0, "fragments came before", "0 < 0"),
    ("cancel received_tokens", 256, "before the last token", "256 < 256"),
    ("cancel closed_at_ms", 499.9, "closed at 500", "500 <= 499.9"),
]


@pytest.mark.parametrize(("path", "value", "text", "two"), BROKEN, ids=[f"{row[0]} {row[1]}" for row in BROKEN])
def test_a_relation_that_does_not_hold_fails_and_names_the_step(lab, results, path, value, text, two):
    set_key(results, path, value)
    write(lab.out, results)
    process = lab.run("report.py")
    assert process.returncode == 1
    lines = [line for line in process.out.splitlines() if line.startswith("FAILS ")]
    assert any(text in line and line.endswith(" " + two) for line in lines), process.out
    [line] = process.err.splitlines()
    assert line.startswith("report.py: ")
    assert SCRIPT[path.split()[0]] in line
    assert len(lab.read("report.json")) == 7  # a copy is written all the same


def test_every_relation_has_a_row_here():
    assert len(BROKEN) == RELATIONS


# ---------------------------------------------------------------------------- what it refuses


def refuses(lab, *words, command=("report.py",)):
    before = lab.earlier() if not (lab.out / "report.json").exists() else lab.files()
    process = lab.run(*command)
    assert process.returncode == 1
    [line] = process.err.splitlines()
    assert line.startswith("report.py: ")
    for word in words:
        assert word in line
    assert lab.files() == before


def test_every_missing_file_is_named_in_one_go_with_the_script_that_makes_it(lab, results):
    write(lab.out, {"ttft": results["ttft"], "cancel": results["cancel"], "report": "earlier"})
    words = [f"{name}.json (measure_{name}.py" for name in ("prefill", "cache", "sentence")]
    refuses(lab, str(lab.out), *words)


def test_without_any_folder_all_five_are_named_and_none_is_made(lab):
    process = lab.run("report.py")
    assert process.returncode == 1
    assert all(script in process.err for script in SCRIPT.values())
    assert not lab.out.exists()


@pytest.mark.parametrize("name", [*RESULTS, "cancel_prefill", "props"])
def test_a_file_that_is_not_json_is_named(lab, results, name):
    write(lab.out, results, report="earlier")
    (lab.out / f"{name}.json").write_bytes(b'{"half": \xff')
    refuses(lab, f"{name}.json", "not JSON")


WRONG = [
    ("ttft runs", {}, "ttft.json: runs"),
    ("ttft runs", [], "ttft.json: runs"),
    ("ttft runs 2", None, "ttft.json: runs[2]"),
    ("ttft runs 4 tokens", DELETE, "ttft.json: runs[4] tokens is missing"),
    ("ttft runs 1 ttft_ms", float("nan"), "ttft.json: runs[1] ttft_ms is nan"),
    ("ttft ttft_p50", None, "ttft.json: ttft_p50 is missing"),
    ("ttft total_p50", float("inf"), "ttft.json: total_p50 is inf"),
    ("prefill 2 prompt_n", "1290", "prefill.json:[2] prompt_n is '1290'"),
    ("prefill 1 docs", 5, "prefill.json: docs is [0, 5, 12]"),
    ("prefill 2", DELETE, "prefill.json: is not a list of 3"),
    ("cache second", DELETE, "cache.json: second"),
    ("cache second ttft_ms", True, "cache.json: second ttft_ms is True"),
    ("cache changed_suffix", 5, "cache.json: changed_suffix"),
    ("sentence first_sentence", 5, "sentence.json: first_sentence is 5"),
    ("sentence text", DELETE, "sentence.json: text is missing"),
    ("sentence total_ms", -1, "sentence.json: total_ms is -1"),
    ("cancel slot_idle_after_ms", [], "cancel.json: slot_idle_after_ms is []"),
    ("cancel", [], "cancel.json: is not an object"),
    ("cancel_prefill docs", DELETE, "cancel_prefill.json: docs is missing"),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG, ids=[row[2] for row in WRONG])
def test_a_value_that_is_not_what_it_must_be_is_named_with_file_and_key(lab, results, path, value, words):
    results["cancel_prefill"] = {"docs": 14, **{key: results["cancel"][key] for key in list(results["cancel"])[1:]}}
    set_key(results, path, value)
    write(lab.out, results, report="earlier")
    refuses(lab, words)


# ---------------------------------------------------------------------------- two runs


def test_against_shows_each_figure_old_new_and_the_change_in_percent(lab, results, tmp_path):
    write(lab.out, results, props=PROPS)
    old = copy.deepcopy(results)
    set_key(old, "cache second ttft_ms", 51.0)
    set_key(old, "ttft ttft_p50", 0)
    write(tmp_path / "old", old, props={**PROPS, "model_path": "other-model.gguf"})
    out = lab.good("report.py", "--against", str(tmp_path / "old")).out
    assert f"old: {tmp_path / 'old'}: other-model.gguf" in out
    assert re.search(r"\n +old +new +change\n", out)
    assert re.search(r"\ncache_ttft_ms +51\.0 +25\.5 +-50\.0%\n", out)
    assert re.search(r"\nttft_12docs_ms +4303\.8 +4303\.8 +\+0\.0%\n", out)
    assert re.search(r"\nttft_p50_ms +0\.0 +92\.0 +from 0\n", out)
    comparison = out.partition("change\n")[2].partition("\n\n")[0]
    names = [re.split(" {2,}", line)[0] for line in comparison.splitlines()]
    assert names[:7] == list(lab.read("report.json"))
    assert names[7:] == ["first token, 0 docs", "first token, 4 docs", "cache, first", "cache, time in front"]
    assert "UNSTEADY" not in out
    set_key(old, "ttft runs 1 total_ms", 800)
    write(tmp_path / "old", old)
    out = lab.good("report.py", "--against", str(tmp_path / "old")).out
    assert re.search(r"\ntotal_p50_ms .*%  UNSTEADY\n", out)
    assert out.count("UNSTEADY") == 1


def test_what_fails_fails_with_a_comparison_too(lab, results, tmp_path):
    write(tmp_path / "old", results)
    set_key(results, "cancel closed_at_ms", 499)
    write(lab.out, results)
    assert lab.run("report.py", "--against", str(tmp_path / "old")).returncode == 1


def test_a_missing_or_broken_file_of_the_earlier_run_is_named(lab, results, tmp_path):
    write(lab.out, results, report="earlier")
    command = ("report.py", "--against", str(tmp_path / "old"))
    refuses(lab, "no folder", str(tmp_path / "old"), command=command)
    (tmp_path / "old").mkdir()
    refuses(lab, str(tmp_path / "old"), *SCRIPT.values(), command=command)
    set_key(results, "ttft ttft_p50", "92")
    write(tmp_path / "old", results)
    refuses(lab, str(tmp_path / "old" / "ttft.json") + ": ttft_p50", command=command)
