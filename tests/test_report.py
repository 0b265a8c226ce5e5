"""The report: what it copies, what it shows, what must hold, and what it refuses to read."""

import copy
import json
import os
import re
import shutil
import sys

import pytest
from conftest import TOP

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
    "cancel": {
        "max_tokens": 256,
        "received_tokens": 52,
        "closed_at_ms": 501.0,
        "slot_idle_after_ms": 16.5,
    },
}
SUFFIX = {"prompt_n": 30, "ttft_ms": 234.0}
EARLY = {"docs": 14, "closed_at_ms": 103.0, "next_ttft_ms": 4892.0, "next_prompt_ms": 92.1}
PROPS = {
    "model_path": "/models/small-model.gguf",
    "default_generation_settings": {"n_ctx": 4096},
    "total_slots": 1,
    "build_info": "b11434",
}
CHECKS = 21
SCRIPTS = {name: f"measure_{name}.py" for name in RESULTS}
SCRIPTS.update(cancel_prefill="measure_cancel.py --during-prefill", props="sse.py --server")


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
    process = lab.run_ok("report.py")
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
    assert "".join(process.out.split()).endswith("wrote" + str(lab.out / "report.json"))


# ---------------------------------------------------------------------------- the picture


def test_the_picture_shows_each_time_with_a_bar_and_its_words_on_80_columns(lab, results):
    write(lab.out, results, props=PROPS)
    out = lab.run_ok("report.py").out
    assert "small-model.gguf, context 4096, slots 1, build b11434" in out
    assert re.search(r"first token +92\.0 ms ▏ +p50 of 5, 90\.0 to 94\.0\n", out)
    assert re.search(r"whole answer +302\.0 ms ▌ +p50 of 5, 300\.0 to 304\.0\n", out)
    assert re.search(r"first token, 0 docs +98\.2 ms ▏ +35 tokens at 2\.60 ms, prefill 93%\n", out)
    assert re.search(
        r"first token, 4 docs +1317\.5 ms █.? +473 tokens at 2\.78 ms, prefill 100%\n", out
    )
    assert re.search(
        r"first token, 12 docs +4303\.8 ms █+.? +1290 tokens at 3\.33 ms, prefill 100%\n", out
    )
    assert re.search(r"cache, first +5280\.0 ms █+.? +1486 tokens computed\n", out)
    assert re.search(r"cache, same again +25\.5 ms ▏ +1 token computed \(first: 1486\)\n", out)
    assert re.search(
        r"cache, clock first +5400\.0 ms █{8} +1499 tokens computed \(first: 1486\)\n", out
    )
    assert re.search(r"first sentence +217\.0 ms .+speech starts; 142\.0 after first token\n", out)
    assert re.search(
        r"stop after hang-up +16\.5 ms ▏ +closed at 501\.0, 52 fragments received\n", out
    )
    assert "clock last" not in out
    assert "next caller" not in out
    assert "UNSTEADY" not in out


def test_the_default_output_with_all_rows_fits_one_screen(lab, results):
    results["cache"]["changed_suffix"] = SUFFIX
    alias = {
        **PROPS,
        "model_alias": "a model with an alias that is rather long and says little " * 3,
    }
    write(lab.out, results, cancel_prefill=EARLY, props=alias)
    lines = lab.run_ok("report.py").out.splitlines()
    assert f"{CHECKS} of {CHECKS} checks hold" in lines
    assert len(lines) <= 24
    assert lines[1].endswith(" …")
    assert lines[2].startswith("first token ")
    for run, ms in zip(results["ttft"]["runs"], (10, 90, 90, 90, 500)):
        run["ttft_ms"] = ms
        run["total_ms"] = 10 * ms
    results["ttft"].update(ttft_p50=90, total_p50=900)
    results["cache"]["first"]["ttft_ms"] = 15000.0
    write(lab.out, results)
    lines = lab.run_ok("report.py").out.splitlines()
    assert len(lines) <= 24


def test_bars_are_on_one_scale(lab, results):
    results["prefill"][1]["ttft_ms"] = 2700.0  # half of the longest
    write(lab.out, results)
    lab.env["COLUMNS"] = "200"
    out = lab.run_ok("report.py").out
    assert re.search(r"4 docs +2700\.0 ms █{12} ", out)
    assert re.search(r"clock first +5400\.0 ms █{24} ", out)


@pytest.mark.parametrize("options", [[], ["--checks"], ["--against"]])
@pytest.mark.parametrize("columns", [1, 40, 60, 80, 250])
def test_everything_fits_the_width_of_the_terminal(lab, results, tmp_path, columns, options):
    results["cache"]["changed_suffix"] = SUFFIX
    write(tmp_path / "old", results, cancel_prefill=EARLY, props=PROPS)
    results["ttft"]["runs"][0]["ttft_ms"] = 1.0
    results["cache"]["first"]["ttft_ms"] = 123456.0
    results["cancel"]["closed_at_ms"] = 499.0
    long_name = {
        **PROPS,
        "model_path": "a rather long name of a model with words in it and more words and more and more",
    }
    write(lab.out, results, cancel_prefill=EARLY, props=long_name)
    os.utime(lab.out / "cache.json", (1, 1))
    lab.env["COLUMNS"] = str(columns)
    process = lab.run("report.py", *options, *[str(tmp_path / "old")] * (options == ["--against"]))
    lines = process.out.splitlines()
    assert len(lines) > 10, process.err
    assert max(map(len, lines)) <= max(columns, 40)
    assert len([line for line in lines if line.startswith("FAILS")]) == 1


def test_bars_are_hash_marks_where_the_encoding_has_no_blocks(lab, results):
    write(lab.out, results)
    lab.env["PYTHONIOENCODING"] = "ascii"
    out = lab.run_ok("report.py").out
    assert out.isascii()
    assert re.search(r"clock first +5400\.0 ms #{8} ", out)
    assert re.search(r"same again +25\.5 ms # ", out)


def test_runs_that_spread_more_than_twofold_are_marked_as_unsteady(lab, results):
    for key, name in ("ttft_ms", "first token"), ("total_ms", "whole answer"):
        changed = copy.deepcopy(results)
        last = changed["ttft"]["runs"][4]
        last.update(ttft_ms=100.0, total_ms=602.0) if key == "total_ms" else last.update(
            ttft_ms=181.0
        )
        write(lab.out, changed)
        out = lab.run_ok("report.py").out
        assert re.search(rf"{name} .* to {last[key]}, UNSTEADY", out)
        assert out.count("UNSTEADY") == 1
        assert "measure again on an idle machine" in out
        last[key] = 2 * changed["ttft"]["runs"][0][key]
        write(lab.out, changed)
        assert "UNSTEADY" not in lab.run_ok("report.py").out


COLD = ["first token, 12 docs", "cache, first", "cache, clock first"]


@pytest.mark.parametrize("name", COLD)
def test_cold_prompts_that_cost_more_than_one_and_a_half_times_as_much_a_token_are_marked(
    lab, results, name
):
    results["prefill"][2].update(prompt_n=1200, ttft_ms=4800.0)  # 4 ms a token, each of them
    results["cache"]["first"].update(prompt_n=1400, ttft_ms=5600.0)
    results["cache"]["changed_prefix"].update(prompt_n=1500, ttft_ms=6000.0)
    lab.env["COLUMNS"] = "200"
    row = dict(
        zip(
            COLD,
            (results["prefill"][2], results["cache"]["first"], results["cache"]["changed_prefix"]),
        )
    )[name]
    row["ttft_ms"] = 6.01 * row["prompt_n"]
    write(lab.out, results)
    out = lab.run_ok("report.py").out
    assert [line.split("  ")[0] for line in out.splitlines() if line.endswith(", UNSTEADY")] == COLD
    row["ttft_ms"] = 6 * row["prompt_n"]
    write(lab.out, results)
    assert "UNSTEADY" not in lab.run_ok("report.py").out


def test_a_next_caller_that_waits_much_longer_than_the_whole_prompt_takes_is_marked(lab, results):
    lab.env["COLUMNS"] = "200"
    longest = 1.5 * (5280 + 92.1)
    for wait, marks in (longest, 0), (longest + 0.1, 1):
        write(lab.out, results, cancel_prefill={**EARLY, "next_ttft_ms": wait})
        assert lab.run_ok("report.py").out.count("UNSTEADY") == marks


def test_the_two_experiments_past_the_lab_are_shown_where_they_are_there(lab, results):
    results["cache"]["changed_suffix"] = SUFFIX
    write(lab.out, results, cancel_prefill=EARLY)
    out = lab.run_ok("report.py").out
    assert re.search(r"cache, clock last +234\.0 ms .* 30 tokens computed \(first: 1486\)\n", out)
    assert re.search(
        r"next caller waits +4892\.0 ms █{7}.? hang-up in prefill; its own: 92\.1\n", out
    )


def test_a_hang_up_during_prefill_of_an_earlier_run_is_not_shown(lab, results):
    write(lab.out, results, cancel_prefill=EARLY)
    for name in RESULTS:
        os.utime(lab.out / f"{name}.json", (1000, 1000))
    os.utime(lab.out / "ttft.json", (900, 900))
    os.utime(lab.out / "cancel_prefill.json", (899, 899))  # a run takes longer than a second
    assert "next caller waits" in lab.run_ok("report.py").out
    for content in EARLY, {"docs": 14, "slot_idle_after_ms": 1.0}:  # or of an earlier version
        write(lab.out, {}, cancel_prefill=content)
        os.utime(lab.out / "cancel_prefill.json", (898, 898))
        assert "next caller waits" not in lab.run_ok("report.py").out


def test_files_of_different_runs_are_asked_about(lab, results):
    def asked(**times):
        write(lab.out, results)
        for number, name in enumerate(RESULTS):
            at = times.get(name, 1000 + number)
            os.utime(lab.out / f"{name}.json", (at, at))
        return " ".join(lab.run_ok("report.py").out.split())

    assert "of one run?" not in asked(cancel=1599.9)
    assert "ttft.json is 10 minutes older than cancel.json: are they of one run?" in asked(
        cancel=1600
    )
    assert "cache.json is 60 minutes older than sentence.json: are they of one run?" in asked(
        cache=-2000, sentence=1600
    )
    # A run writes them in order: one that was stopped after the second leaves the others of the run before.
    assert "of one run?" not in asked(prefill=1003, cache=1002)
    assert "cache.json is older than prefill.json: are they of one run?" in asked(
        prefill=1003.1, cache=1002
    )


def test_a_model_that_props_does_not_name_is_no_failure(lab, results):
    unnamed = (
        {},
        {"model_path": None},
        {"default_generation_settings": 5, "model_path": "\x1b[2Jx"},
        {"model_path": ""},
    )
    for props in unnamed:
        write(lab.out, results, props=props)
        out = lab.run_ok("report.py").out
        assert "\x1b" not in out
        assert "None" not in out
    assert "not named in props.json" in out
    write(lab.out, results, props=[])
    lab.run_fails("report.py", words=("props.json", "not an object", "sse.py --server"))


# ---------------------------------------------------------------------------- what must hold


def test_checks_lists_every_check_with_its_two_figures(lab, results):
    write(lab.out, results)
    lines = lab.run_ok("report.py", "--checks").out.splitlines()
    listed = [line for line in lines if line.startswith(("ok ", "FAILS "))]
    assert len(listed) == CHECKS
    assert all(re.fullmatch(r"ok     .+ [\d.]+ (<|<=|==) [\d.]+", line) for line in listed)
    assert f"{CHECKS} of {CHECKS} checks hold" in lines


def test_by_default_only_what_fails_is_listed(lab, results):
    write(lab.out, results)
    assert "ok  " not in lab.run_ok("report.py").out


BROKEN = [
    ("ttft runs 3 ttft_ms", 303.0, "the first token comes before the end", "303 < 303"),
    ("ttft ttft_p50", 93.0, "ttft_p50 is the third of the five", "93 == 92"),
    ("ttft total_p50", 301.0, "total_p50 is the third of the five", "301 == 302"),
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
    ("cancel slot_idle_after_ms", 982.74, "before half of the rest was due", "982.74 < 982.731"),
]
CAUSES = {
    "cache second prompt_n": "second reused nothing: the model (sliding window",
    "cache changed_prefix prompt_n": "--cache-ram 0 and -np 1",
    "cancel slot_idle_after_ms": "the server may have gone on to the end",
    "prefill 0 prompt_n": "the documents add no tokens",
    "prefill 1 prompt_n": "the documents add no tokens",
}


@pytest.mark.parametrize(
    ("path", "value", "text", "two"), BROKEN, ids=[f"{row[0]} {row[1]}" for row in BROKEN]
)
def test_a_relation_that_does_not_hold_fails_and_names_the_step(
    lab, results, path, value, text, two
):
    set_key(results, path, value)
    write(lab.out, results)
    process = lab.run("report.py")
    assert process.returncode == 1
    lines = process.out.splitlines()
    script = f"measure_{path.split()[0]}.py"
    [at] = [
        n
        for n, line in enumerate(lines)
        if line.startswith("FAILS ") and text in line and line.endswith(" " + two)
    ]
    assert lines[at + 1] == f"       run {script} again"
    failed = len([line for line in lines if line.startswith("FAILS ")])
    assert f"{CHECKS - failed} of {CHECKS} checks hold" in lines
    [line] = process.err.splitlines()
    assert line.startswith(f"report.py: {failed} check")
    assert script in line
    assert line.endswith("report.py")
    assert CAUSES.get(path, "again on an idle machine, then report.py") in line
    assert len(lab.read("report.json")) == 7  # a copy is written all the same


def test_a_check_that_allows_two_equal_figures_holds_for_them(lab, results):
    for row in results["prefill"]:
        row["prompt_ms"] = row["ttft_ms"]
    results["sentence"].update(
        ttft_ms=966.0, first_sentence_ms=966.0, first_sentence="All.", text="All."
    )
    results["cache"]["first"]["prompt_n"] = 10 * 140
    results["cache"]["changed_prefix"]["prompt_n"] = 9 * 140
    results["cancel"]["closed_at_ms"] = 500
    write(lab.out, results)
    assert f"{CHECKS} of {CHECKS} checks hold" in lab.run_ok("report.py").out


def test_counts_and_times_of_zero_are_no_traceback(lab, results):
    for row in (
        *results["prefill"],
        results["cache"]["first"],
        results["cache"]["changed_prefix"],
        results["cancel"],
    ):
        row.update(dict.fromkeys(row.keys() - {"docs"}, 0))
    write(lab.out, results)
    process = lab.run("report.py")
    assert process.returncode == 1
    assert "Traceback" not in process.err
    assert "checks FAIL" in process.err


def test_every_check_has_a_row_here():
    assert len({text for _, _, text, _ in BROKEN}) == CHECKS


def test_a_hit_that_is_merely_slow_is_not_blamed_on_the_model(lab, results):
    set_key(results, "cache second ttft_ms", 5281.0)
    set_key(results, "cache second prompt_n", 1337)  # below 0.9 of 1486
    write(lab.out, results)
    err = lab.run("report.py").err
    assert "reused nothing" not in err
    assert "on an idle machine" in err


# ---------------------------------------------------------------------------- what it refuses


def test_every_missing_file_is_named_in_one_go_with_the_script_that_makes_it(lab, results):
    write(lab.out, {"ttft": results["ttft"], "cancel": results["cancel"], "report": "earlier"})
    words = [f"{name}.json (measure_{name}.py" for name in ("prefill", "cache", "sentence")]
    process = lab.run_fails("report.py", words=(str(lab.out), *words))
    assert "cancel.json" not in process.line


@pytest.mark.parametrize("simulated", [False, True])
def test_without_any_folder_the_setting_and_the_simulated_results_are_named_and_none_is_made(
    lab, tmp_path, simulated
):
    for path in TOP.glob("*.py"):
        shutil.copy(path, tmp_path)
    if simulated:
        (tmp_path / "fake-results").mkdir()
    process = lab.run(sys.executable, str(tmp_path / "report.py"))
    lab.failed(
        process,
        {},
        (f"no folder {lab.out}", "VOICE_LLM_OUT", *(f"measure_{name}.py" for name in RESULTS)),
    )
    assert (str(tmp_path / "fake-results") in process.err) == simulated
    assert not lab.out.exists()


@pytest.mark.parametrize("name", [*RESULTS, "cancel_prefill", "props"])
@pytest.mark.parametrize("content", [b'{"half": \xff', b"[" * 100_000], ids=["half", "deep"])
def test_a_file_that_is_not_json_is_named(lab, results, name, content):
    write(lab.out, results, report="earlier")
    (lab.out / f"{name}.json").write_bytes(content)
    lab.run_fails("report.py", words=(f"{name}.json", "not JSON", f"run {SCRIPTS[name]} again"))


WRONG = [
    ("ttft runs", {}, "ttft.json: runs is {}, not a list of 5"),
    ("ttft runs", [], "ttft.json: runs is [], not a list of 5"),
    ("ttft runs 2", None, "ttft.json: runs[2] is missing"),
    ("ttft runs 4 tokens", DELETE, "ttft.json: runs[4] tokens is missing"),
    ("ttft runs 1 ttft_ms", float("nan"), "ttft.json: runs[1] ttft_ms is nan"),
    ("ttft ttft_p50", None, "ttft.json: ttft_p50 is missing"),
    ("ttft total_p50", float("inf"), "ttft.json: total_p50 is inf"),
    ("prefill 2 prompt_n", "1290", "prefill.json: [2] prompt_n is '1290'"),
    ("prefill 1 docs", 5, "prefill.json: docs is [0, 5, 12]"),
    ("prefill 2", DELETE, "not a list of 3"),
    ("cache second", DELETE, "cache.json: second is missing"),
    ("cache second ttft_ms", True, "cache.json: second ttft_ms is True"),
    ("cache changed_suffix", 5, "cache.json: changed_suffix is 5, not an object"),
    ("sentence first_sentence", 5, "sentence.json: first_sentence is 5, not a text"),
    ("sentence text", DELETE, "sentence.json: text is missing"),
    ("sentence total_ms", -1, "sentence.json: total_ms is -1"),
    ("cancel slot_idle_after_ms", [], "cancel.json: slot_idle_after_ms is []"),
    ("cancel", [], "cancel.json: is [], not an object"),
    ("cancel_prefill docs", DELETE, "cancel_prefill.json: docs is missing"),
    ("cancel_prefill next_ttft_ms", DELETE, "cancel_prefill.json: next_ttft_ms is missing"),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG, ids=[row[2] for row in WRONG])
def test_a_value_that_is_not_what_it_must_be_is_named_with_file_and_key(
    lab, results, path, value, words
):
    results["cancel_prefill"] = dict(EARLY)
    set_key(results, path, value)
    write(lab.out, results, report="earlier")
    lab.run_fails("report.py", words=(words, f"run {SCRIPTS[path.split()[0]]} again"))


def leaves(value, way=()):
    """The way to every number and text in `value`."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else []
    )
    return (
        [way] if not items else [leaf for key, item in items for leaf in leaves(item, (*way, key))]
    )


@pytest.mark.parametrize("name", [*RESULTS, "cancel_prefill"])
def test_every_key_of_a_file_is_looked_for(lab, results, name):
    results.update(cancel_prefill=EARLY)
    results["cache"]["changed_suffix"] = SUFFIX
    ways = {way[-1]: way for way in leaves(results[name])}.values()  # one for each key
    if name == "cache":
        ways = leaves(results[name])
    for way in ways:
        changed = copy.deepcopy(results)
        set_key(changed, " ".join(map(str, (name, *way))), DELETE)
        write(lab.out, changed)
        lab.run_fails("report.py", words=(f"{name}.json", f"{way[-1]} is missing"))


# ---------------------------------------------------------------------------- two runs


def compare(lab, old):
    """The lines of a comparison with the results in `old`, and its table as {name: the cells behind it}."""
    lines = lab.run_ok("report.py", "--against", str(old)).out.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.split() == ["old", "new", "change"])
    table = lines[begin + 1 : lines.index("", begin)]
    return lines, {line[:32].rstrip(): re.split(" {2,}", line[32:].strip()) for line in table}


def test_against_is_one_table_of_all_rows_with_the_seven_of_report_json_first(
    lab, results, tmp_path
):
    results["cache"]["changed_suffix"] = SUFFIX
    write(lab.out, results, props=PROPS, cancel_prefill=EARLY)
    old = copy.deepcopy(results)
    set_key(old, "cache second ttft_ms", 51.0)
    set_key(old, "ttft ttft_p50", 0)
    set_key(old, "prefill 2 prompt_n", 2580)
    write(tmp_path / "old", old, props=PROPS, cancel_prefill=EARLY)
    lines, table = compare(lab, tmp_path / "old")
    seven = [
        "first token",
        "whole answer",
        "first token, 12 docs",
        "tokens, 12 docs",
        "cache, same again",
    ]
    assert list(table)[:7] == [*seven, "first sentence", "stop after hang-up"]
    assert table["first token"] == ["0.0", "92.0", "from 0"]
    assert table["first token, 12 docs"] == ["4303.8", "4303.8", "+0.0%", "UNSTEADY"]
    assert table["tokens, 12 docs"] == ["2580", "1290", "-50.0%"]
    assert table["cache, same again"] == ["51.0", "25.5", "-50.0%"]
    assert table["ms per token, 12 docs"][:3] == ["1.67", "3.34", "+100.0%"]
    assert table["ms per token, cache, first"][:2] == ["3.55", "3.55"]
    assert table["ms per token, cache, clock first"][:2] == ["3.60", "3.60"]
    assert table["tokens, cache, clock first"] == ["1499", "1499", "+0.0%"]
    assert table["next caller waits"] == ["4892.0", "4892.0", "+0.0%"]
    names = {
        "first token, 0 docs",
        "first token, 4 docs",
        "cache, first",
        "cache, clock last",
        "cache, clock first",
    }
    assert names < set(table)
    assert not [line for line in lines if "NOT THE SAME" in line]
    assert len(table) == 22


def test_against_a_run_with_other_rows_says_not_measured_on_the_side_that_lacks_them(
    lab, results, tmp_path
):
    write(tmp_path / "old", results, cancel_prefill=EARLY)
    results["cache"]["changed_suffix"] = SUFFIX
    write(lab.out, results)
    _, table = compare(lab, tmp_path / "old")
    assert table["next caller waits"] == ["4892.0 not measured"]
    assert table["cache, clock last"] == ["not measured", "234.0"]


def test_against_marks_what_is_unsteady_in_either_run(lab, results, tmp_path):
    write(lab.out, results)
    old = copy.deepcopy(results)
    set_key(old, "ttft runs 1 total_ms", 800)
    set_key(old, "ttft total_p50", 303.0)
    write(tmp_path / "old", old)
    write(tmp_path / "older", results)
    lines, table = compare(lab, tmp_path / "old")
    assert table["whole answer"][-1] == "UNSTEADY"
    assert "\n".join(lines).count("UNSTEADY") == 1
    lab.env["VOICE_LLM_OUT"] = str(tmp_path / "old")
    _, table = compare(lab, tmp_path / "older")
    assert table["whole answer"][-1] == "UNSTEADY"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model_path": "other.gguf"}, "model"),
        ({"default_generation_settings": {"n_ctx": 8192}}, "context"),
        ({"total_slots": 4}, "slots"),
        ({"build_info": "b9093"}, "build"),
    ],
)
def test_against_says_where_model_context_slots_or_build_differ(
    lab, results, tmp_path, change, name
):
    write(lab.out, results, props=PROPS)
    write(tmp_path / "old", results, props={**PROPS, **change})
    lines, _ = compare(lab, tmp_path / "old")
    [line] = [line for line in lines if line.startswith("NOT THE SAME")]
    assert line.startswith(f"NOT THE SAME: {name}.")
    assert str(tmp_path / "old") in "".join(lines)


def test_against_says_that_nobody_knows_where_a_run_has_no_props(lab, results, tmp_path):
    write(lab.out, results, props=PROPS)
    write(tmp_path / "old", results)
    lines, _ = compare(lab, tmp_path / "old")
    assert not [line for line in lines if line.startswith("NOT THE SAME")]
    assert [line for line in lines if line.startswith("props.json is missing: nobody knows")]


def test_a_run_is_not_compared_with_itself(lab, results):
    write(lab.out, results, report="earlier")
    lab.run_fails("report.py", "--against", str(lab.out / "."), words=("VOICE_LLM_OUT itself",))


def test_what_fails_fails_with_a_comparison_too(lab, results, tmp_path):
    write(tmp_path / "old", results)
    set_key(results, "cancel closed_at_ms", 499)
    write(lab.out, results)
    assert lab.run("report.py", "--against", str(tmp_path / "old")).returncode == 1


def test_a_missing_or_broken_file_of_the_earlier_run_is_named(lab, results, tmp_path):
    write(lab.out, results, report="earlier")
    command = ("report.py", "--against", str(tmp_path / "old"))
    lab.run_fails(*command, words=("no folder", str(tmp_path / "old")))
    (tmp_path / "old").mkdir()
    names = [f"measure_{name}.py" for name in RESULTS]
    process = lab.run_fails(*command, words=(str(tmp_path / "old"), "set --against", *names))
    assert "VOICE_LLM_OUT" not in process.line
    set_key(results, "ttft ttft_p50", "92")
    write(tmp_path / "old", results)
    lab.run_fails(*command, words=(str(tmp_path / "old" / "ttft.json") + ": ttft_p50",))
