"""The report: what it copies, shows and compares, what must hold, and what it refuses."""

import copy
import json
import os
import re
import shutil
import sys

import pytest
from conftest import TOP

import report
import sse


def row(keys, *values):
    return dict(zip(keys.split(), values))


ANSWERS = [row("ttft_ms total_ms tokens", 90.0 + n, 300.0 + n, 31) for n in (2, 0, 1, 3, 4)]
PREFILL, ASKED = "docs prompt_n prompt_ms ttft_ms", "prompt_n ttft_ms"
SENTENCE = "ttft_ms first_sentence_ms total_ms first_sentence text"
CANCEL = "max_tokens received_tokens closed_at_ms slot_idle_after_ms"
LAB = {
    "ttft": row("runs ttft_p50 total_p50", ANSWERS, 92.0, 302.0),
    "prefill": [
        row(PREFILL, 0, 35, 91.0, 98.25),
        row(PREFILL, 4, 473, 1314.0, 1317.5),
        row(PREFILL, 12, 1290, 4298.0, 4303.75),
    ],
    "cache": {
        "first": row(ASKED, 1486, 5280.0),
        "second": row(ASKED, 1, 25.5),
        "changed_prefix": row(ASKED, 1499, 5400.0),
    },
    "sentence": row(SENTENCE, 75.0, 217.0, 966.0, "Eat nothing.", "Eat nothing. Drink water."),
    "cancel": row(CANCEL, 256, 52, 501.0, 16.5),
}
SEVEN = "ttft_p50_ms total_p50_ms ttft_12docs_ms prompt_n_12docs cache_ttft_ms "
SEVEN += "first_sentence_ms cancel_idle_ms"
SEVEN = row(SEVEN, 92.0, 302.0, 4303.75, 1290, 25.5, 217.0, 16.5)


def turns(*computed):
    keys, rows = "turn prompt_n cache_n ttft_ms first_sentence_ms", []
    for turn, n in enumerate(computed, 1):
        sentence_ms = None if turn == 3 else 500.5 + 6 * n  # interrupted
        rows.append(row(keys, turn, n, 1723 - n, 200.0 + 6 * n, sentence_ms))
    return rows


CALL = {
    "interrupted": 3,
    "no_clock": turns(1485, 22, 21, 18, 21, 20),
    "clock_in_message": turns(40, 32, 31, 29, 30, 30),
    "clock_not_kept": turns(40, 92, 90, 47, 90, 90),
    "clock_in_system": turns(60, 89, 130, 178, 250, 312),
}
EARLY = row("docs closed_at_ms next_ttft_ms next_prompt_ms", 14, 103.0, 4892.0, 92.0)
SERVER = "model_path default_generation_settings total_slots build_info"
PROPS = row(SERVER, "/models/small-model.gguf", {"n_ctx": 4096}, 1, "b11434")
SCRIPTS = {
    **{name: f"measure_{name}.py" for name in LAB},
    "call": "measure_cache.py --call",
    "cancel_prefill": "measure_cancel.py --during-prefill",
    "request": "sse.py",
}
CHECKS, ALL = 21, 24  # without a call, with one
DELETE = object()


def asked(prompt=sse.SYSTEM, question=sse.QUESTION):
    """The content of request.json."""
    roles = zip(("system", "user"), (prompt, question))
    return {"messages": [{"role": role, "content": text} for role, text in roles], "stream": True}


@pytest.fixture
def results(lab):
    """The results of a good run, to be changed and written; the experiments past the lab, too."""
    lab.out.mkdir()
    lab.env.update(COLUMNS="80", TZ="UTC")
    more = {"call": CALL, "cancel_prefill": EARLY, "props": PROPS, "request": asked()}
    more = copy.deepcopy({**LAB, **more})
    more["cache"]["changed_suffix"] = {"prompt_n": 30, "ttft_ms": 234.0}
    return more


def write(folder, results, changes=(), at=None, less=()):
    """Write the files of one run, but those in `less`. `changes`: {way: value}, see set_key()."""
    results = copy.deepcopy({name: results[name] for name in results if name not in less})
    for way, value in dict(changes).items():
        set_key(results, way, value)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in results.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content), "utf-8")
        if at:
            os.utime(path, (at, at))


def set_key(results, way, value):
    """Change one value, or take it away with DELETE; a way such as "ttft.runs.0.ttft_ms"."""
    *holders, last = [int(key) if key.isdigit() else key for key in way.split(".")]
    for key in holders:
        results = results[key]
    if value is DELETE:
        del results[last]
    else:
        results[last] = value


def shown(lab, results, changes=(), less=()):
    """What the report of these results prints."""
    write(lab.out, results, changes, less=less)
    return lab.run_ok("report.py").out


def picture(out):
    """The rows of a picture → {name: (ms, words)}."""
    bar = r"^(\S.*?) +([\d.]+) ms [▏▎▍▌▋▊▉█#]+ *(.*(?:\n {40,}.*)*)$"
    rows = re.findall(bar, out, re.MULTILINE)
    return {name: (float(ms), " ".join(words.split())) for name, ms, words in rows}


def only_lab(results):
    return {name: results[name] for name in LAB}


# ---------------------------------------------------------------------------- the picture


def test_report_json_has_the_seven_figures_copied(lab, results):
    write(lab.out, only_lab(results))
    process = lab.run_ok("report.py")
    assert list(lab.read("report.json").items()) == list(SEVEN.items())
    assert process.err == ""
    assert "".join(process.out.split()).endswith("wrote" + str(lab.out / "report.json"))


def test_the_picture_shows_each_time_with_a_bar_and_its_words(lab, results):
    write(lab.out, results)
    lab.env["COLUMNS"] = "120"
    out = lab.run_ok("report.py").out
    assert out.startswith(f"Where the time goes: {SMALL}\n")
    assert picture(out) == {
        "first token": (92.0, "p50 of 5, 90.0 to 94.0"),
        "whole answer": (302.0, "p50 of 5, 300.0 to 304.0, 7.0 ms a token"),
        "first token, 0 docs": (98.2, "35 tokens at 2.60 ms, prefill 93%"),
        "first token, 4 docs": (1317.5, "473 tokens at 2.78 ms, prefill 100%"),
        "first token, 12 docs": (4303.8, "1290 tokens at 3.33 ms, prefill 100%"),
        "cache, first": (5280.0, "1486 tokens computed"),
        "cache, same again": (25.5, "1 token computed, first: 1486"),
        "cache, clock last": (234.0, "30 tokens computed, first: 1486"),
        "cache, clock first": (5400.0, "1499 tokens computed, first: 1486"),
        "first sentence": (217.0, "speech, 142.0 after the first token"),
        "stop after hang-up": (16.5, "closed at 501.0 with 52 fragments"),
        "next caller waits": (4892.0, "hang-up in prefill, its own: 92.0"),
        "turn 6, no clock": (320.0, "20 of 1723 tokens computed"),
        "turn 6, clock in message": (380.0, "30 of 1723 tokens computed"),
        "turn 6, clock not kept": (740.0, "90 of 1723 tokens computed"),
        "turn 6, clock in system": (2072.0, "312 of 1723 tokens computed"),
        "turn 4, interruption": (308.0, "18 of 1723 tokens computed"),
        "turn 6, first sentence": (620.5, "320.0 first token, 300.5 generation"),
    }
    assert "UNSTEADY" not in out


def test_what_was_not_measured_past_the_lab_is_no_row(lab, results):
    results["call"].update(interrupted=None)
    for call in report.CALLS.split():
        set_key(results, f"{call}.5.cache_n", None)
    set_key(results, "call.clock_in_message.5.cache_n", 0)
    set_key(results, "call.no_clock.5.first_sentence_ms", None)
    del results["cache"]["changed_suffix"], results["cancel_prefill"]
    rows = picture(shown(lab, results))
    assert rows["turn 6, no clock"][1] == "20 tokens computed"
    assert rows["turn 6, clock in message"][1] == "30 of 30 tokens computed"
    left_out = {"turn 4, interruption", "turn 6, first sentence", "cache, clock last"}
    assert not {*left_out, "next caller waits"} & set(rows)
    assert len(rows) == 14


@pytest.mark.parametrize(("more", "most"), [(False, 24), (True, 30)])
def test_the_report_fits_a_screen_of_80_columns_whatever_is_marked(lab, results, more, most):
    results["ttft"]["runs"][4].update(ttft_ms=181000.0, total_ms=1900000.0)
    set_key(results, "cache.first.ttft_ms", 15000.0)
    set_key(results, "cancel_prefill.next_ttft_ms", 123456.7)
    set_key(results, "props.model_alias", "an alias that says as much again")
    lab.env["COLUMNS"] = "40"  # a terminal wraps by itself
    out = shown(lab, results if more else {**only_lab(results), "props": results["props"]})
    lines = out.splitlines()
    assert out.count("UNSTEADY") == 5 + more
    assert "Rows that are marked vary too much: measure again on an idle machine." in lines
    assert len(lines) <= most
    assert max(map(len, lines)) <= 80


def test_bars_are_on_one_scale_and_hash_marks_where_there_are_no_blocks(lab, results):
    lab.env["COLUMNS"] = "200"
    half = {"prefill.1.ttft_ms": 2700.0}  # of the longest
    out = shown(lab, only_lab(results), half)
    assert re.search(r"4 docs +2700\.0 ms █{12} ", out)
    assert re.search(r"clock first +5400\.0 ms █{24} ", out)
    lab.env.update(COLUMNS="80", PYTHONIOENCODING="ascii")
    out = shown(lab, only_lab(results))
    assert out.isascii()
    assert re.search(r"clock first +5400\.0 ms #{8} ", out)
    assert re.search(r"same again +25\.5 ms # ", out)


COLD = ["first token, 12 docs", "cache, first", "cache, clock first"]
FIRST, PREFIX, WAITS = "cache.first", "cache.changed_prefix", "cancel_prefill.next_ttft_ms"
UNSTEADY = [  # what is just right, what is too much, the rows that are marked then
    ({"ttft.runs.4.ttft_ms": 180.0}, {"ttft.runs.4.ttft_ms": 180.1}, ["first token"]),
    ({"ttft.runs.4.total_ms": 600.0}, {"ttft.runs.4.total_ms": 600.1}, ["whole answer"]),
    ({"prefill.2.ttft_ms": 7200.0}, {"prefill.2.ttft_ms": 7201.0}, COLD),
    ({f"{FIRST}.ttft_ms": 8400.0}, {f"{FIRST}.ttft_ms": 8401.0}, COLD),
    ({f"{PREFIX}.ttft_ms": 9000.0}, {f"{PREFIX}.ttft_ms": 9001.0}, COLD),
    # A token of a prompt that is more than twice as long may cost more.
    ({PREFIX: {"prompt_n": 2801, "ttft_ms": 17000.0}}, {f"{PREFIX}.prompt_n": 2800}, COLD[1:]),
    ({WAITS: 8538.0}, {WAITS: 8538.1}, ["next caller waits"]),  # 1.5 times 5600 and 92
]


@pytest.mark.parametrize(("right", "wrong", "marked"), UNSTEADY)
def test_unsteady_marks_what_one_more_measurement_may_change(lab, results, right, wrong, marked):
    results["prefill"][2].update(prompt_n=1200, ttft_ms=4800.0)  # 4 ms a token, each of the cold
    results["cache"]["first"].update(prompt_n=1400, ttft_ms=5600.0)
    results["cache"]["changed_prefix"].update(prompt_n=1500, ttft_ms=6000.0)
    assert "UNSTEADY" not in shown(lab, results, copy.deepcopy(right))
    rows = picture(shown(lab, results, {**copy.deepcopy(right), **wrong}))
    assert [name for name, (_, words) in rows.items() if "UNSTEADY" in words] == marked


def test_a_token_costs_what_the_middle_one_of_the_answers_says(lab, results):
    for run, cost in zip(results["ttft"]["runs"], [4.0, 9.94, 1.0, 100.0, 50.0]):
        run.update(total_ms=run["ttft_ms"] + 30 * cost)
    set_key(results, "ttft.total_p50", 90.0 + 30 * 9.94)
    assert ", 9.9 ms a token" in picture(shown(lab, results))["whole answer"][1]
    for run in results["ttft"]["runs"]:
        run["tokens"] = 1  # there is none behind the first
    assert "a token" not in picture(shown(lab, results))["whole answer"][1]


@pytest.mark.parametrize("name", ["call", "cancel_prefill"])
def test_an_experiment_past_the_lab_of_an_earlier_run_is_not_shown(lab, results, name):
    row = {"call": "turn 6, no clock", "cancel_prefill": "next caller waits"}[name]
    write(lab.out, results, at=1000)
    os.utime(lab.out / "ttft.json", (900, 900))
    for at, is_shown in (899, True), (898.9, False):  # a run takes longer than a second
        os.utime(lab.out / f"{name}.json", (at, at))
        assert (row in picture(lab.run_ok("report.py").out)) == is_shown
    (lab.out / f"{name}.json").write_text("of another version")
    os.utime(lab.out / f"{name}.json", (898, 898))
    assert row not in picture(lab.run_ok("report.py").out)


def test_it_says_when_the_files_were_written_and_asks_nothing(lab, results):
    write(lab.out, results, at=1_700_000_000)
    os.utime(lab.out / "cache.json", (1_700_000_600, 1_700_000_600))
    out = lab.run_ok("report.py").out
    assert "\nwritten 2023-11-14 22:13 to 22:23\n" in out
    assert "?" not in out
    os.utime(lab.out / "ttft.json", (1_699_900_000, 1_699_900_000))
    assert "\nwritten 2023-11-13 18:26 to 2023-11-14 22:23\n" in lab.run_ok("report.py").out


FAKE = {"model_path": "simulated: a fake server without a model", "model_alias": "simulated"}
FAKE.update(build_info="simulated", total_slots=1)
SMALL = "small-model.gguf, context 4096, slots 1, build b11434"
OWN = "own prompt of 6012 characters"
HEADLINES = [  # props.json, request.json, the first line
    (FAKE, asked(), "simulated: a fake server without a model, slots 1"),
    (PROPS, asked("x" * 6012), f"{SMALL}, {OWN}"),
    (PROPS, asked("x" * 6012, "when?"), f"{SMALL}, {OWN}, own question of 5 characters"),
    (PROPS, asked(question="when?"), f"{SMALL}, own question of 5 characters"),
    ({"model_path": None}, asked(), "a model not named in props.json"),
    ({"default_generation_settings": 5, "model_path": "\x1b[2Jx"}, asked(), r"\x1b[2Jx"),
]


@pytest.mark.parametrize(("props", "body", "headline"), HEADLINES)
def test_the_headline_names_server_and_own_prompt_once(lab, results, props, body, headline):
    lab.env["COLUMNS"] = "200"
    out = shown(lab, {**results, "props": props, "request": body})
    assert out.splitlines()[0] == f"Where the time goes: {headline}"


def test_without_documents_the_rows_and_checks_about_them_are_left_out(lab, results):
    write(lab.out, only_lab({**results, "prefill": LAB["prefill"][:1]}))
    process = lab.run_ok("report.py", "--checks")
    assert not {"ttft_12docs_ms", "prompt_n_12docs"} & set(lab.read("report.json"))
    assert len(lab.read("report.json")) == 5
    rows = picture(process.out)
    assert rows["first token, 0 docs"][0] == 98.2
    assert not [name for name in rows if "4 docs" in name or "12 docs" in name]
    assert f"{CHECKS - 6} of {CHECKS - 6} checks hold" in process.out
    assert "no documents: prefill is over" in process.out


# ---------------------------------------------------------------------------- a file is missing


def test_where_a_file_is_missing_the_others_are_shown_and_report_json_stays(lab, results):
    write(lab.out, {**results, "report": "earlier"}, less=("cache", "prefill"))
    names = (
        "prefill.json (measure_prefill.py makes it), cache.json (measure_cache.py makes it): run"
    )
    process = lab.run_fails("report.py", words=(f"missing in {lab.out}: {names}",))
    rows = picture(process.out)
    assert {"first token", "whole answer", "stop after hang-up", "turn 6, no clock"} <= set(rows)
    assert not [name for name in rows if "docs" in name or "cache" in name]
    assert "13 of 13 checks hold" in process.out
    assert "wrote" not in process.out


@pytest.mark.parametrize("name", LAB)
def test_without_names_the_files_that_this_run_did_not_write(lab, results, name):
    write(lab.out, {**results, "report": "earlier"}, at=1000)
    os.utime(lab.out / f"{name}.json", (900, 900))
    os.utime(lab.out / "call.json", (950, 950))  # older than all that count
    option = ("--without", f"{name},cancel_prefill")
    process = lab.run_fails("report.py", *option, words=(f"({SCRIPTS[name]} makes it)",))
    rows = picture(process.out)
    assert rows
    assert not {"next caller waits", "turn 6, no clock"} & set(rows)


def test_without_all_that_the_lab_asks_for_an_earlier_call_is_not_shown(lab, results):
    write(lab.out, results)
    lab.run_fails("report.py", "--without", ",".join(LAB), words=("missing in", *LAB))


def test_without_optional_files_the_report_is_whole(lab, results):
    write(lab.out, results)
    assert "next caller waits" in lab.run_ok("report.py", "--without", "").out
    process = lab.run_ok("report.py", "--without", "call,cancel_prefill")
    assert not {"next caller waits", "turn 6, no clock"} & set(picture(process.out))
    assert f"{CHECKS} of {CHECKS} checks hold" in process.out
    process = lab.run("report.py", "--without", "cash")
    assert process.returncode == 2
    assert "cancel_prefill" in process.err


@pytest.mark.parametrize("simulated", [False, True])
def test_without_any_result_scripts_and_simulated_results_are_named(lab, tmp_path, simulated):
    for path in TOP.glob("*.py"):
        shutil.copy(path, tmp_path)
    if simulated:
        (tmp_path / "fake-results").mkdir()
    process = lab.run(sys.executable, str(tmp_path / "report.py"))
    process.script = "report.py"
    words = (f"no folder {lab.out}", "VOICE_LLM_OUT", *(f"measure_{name}.py" for name in LAB))
    lab.failed(process, {}, words)
    assert (str(tmp_path / "fake-results") in process.err) == simulated
    assert process.out == ""
    assert not lab.out.exists()


# ---------------------------------------------------------------------------- what must hold


def test_checks_lists_every_check_with_its_two_figures(lab, results):
    write(lab.out, results)
    lines = lab.run_ok("report.py", "--checks").out.splitlines()
    listed = [line for line in lines if line.startswith(("ok ", "FAILS "))]
    assert len(listed) == ALL
    assert all(re.fullmatch(r"ok     .+ [\d.]+ (<|<=|==) [\d.]+", line) for line in listed)
    assert f"{len(listed)} of {len(listed)} checks hold" in lines
    assert "ok  " not in lab.run_ok("report.py").out


BROKEN = [  # what is changed, the check that fails, its figures, the cause that is named
    ("ttft.runs.3.ttft_ms", 303.0, "the first token comes before the end", "303 < 303", ""),
    ("ttft.ttft_p50", 93.0, "ttft_p50 is the third of the five", "93 == 92", ""),
    ("ttft.total_p50", 301.0, "total_p50 is the third of the five", "301 == 302", ""),
    ("prefill.0.prompt_n", 473, "4 documents are more tokens", "473 < 473", "add no tokens"),
    ("prefill.1.prompt_n", 1290, "12 documents are more tokens", "1290 < 1290", "add no tokens"),
    ("prefill.0.ttft_ms", 1317.5, "4 documents delay", "1317.5 < 1317.5", ""),
    ("prefill.2.ttft_ms", 1317.5, "12 documents delay", "1317.5 < 1317.5", ""),
    ("prefill.0.prompt_ms", 98.26, "no documents: prefill is over", "98.26 <= 98.25", ""),
    ("prefill.1.prompt_ms", 1318, "4 documents: prefill is over", "1318 <= 1317.5", ""),
    ("prefill.2.prompt_ms", 4304, "12 documents: prefill is over", "4304 <= 4303.75", ""),
    ("cache.second.prompt_n", 1486, "a hit computes fewer", "1486 < 1486", "second reused nothing"),
    ("cache.second.ttft_ms", 5280.0, "a hit is faster", "5280 < 5280", ""),
    ("cache.changed_prefix.prompt_n", 1337, "0.9 of first", "1337.4 <= 1337", "--cache-ram 0"),
    ("cache.changed_prefix.ttft_ms", 25.5, "slower than a hit", "25.5 < 25.5", ""),
    ("sentence.ttft_ms", 218.0, "first token, then first sentence", "218 <= 217", ""),
    ("sentence.total_ms", 216.0, "first sentence, then the end", "217 <= 216", ""),
    ("sentence.text", "Drink water.", "starts with the sentence", "0 == 12", ""),
    ("cancel.received_tokens", 0, "fragments came before", "0 < 0", ""),
    ("cancel.received_tokens", 256, "before the last token", "256 < 256", ""),
    ("cancel.closed_at_ms", 499.9, "closed at 500", "500 <= 499.9", ""),
    ("cancel.slot_idle_after_ms", 982.74, "half of the rest", "982.74 < 982.731", "a relay"),
    ("call.no_clock.1.prompt_n", 1485, "compute less than turn 1", "1485 < 1485", ""),
    ("call.no_clock.4.ttft_ms", 9110.0, "first token sooner", "9110 < 9110", ""),
    ("call.clock_in_system.5.prompt_n", 30, "in system computes more", "30 < 30", ""),
]


@pytest.mark.parametrize(("way", "value", "text", "two", "cause"), BROKEN)
def test_what_does_not_hold_fails_and_names_the_step(lab, results, way, value, text, two, cause):
    set_key(results, way, value)
    write(lab.out, results)
    process = lab.run("report.py")
    assert process.returncode == 1
    lines = process.out.splitlines()
    script = SCRIPTS[way.split(".")[0]]
    [at] = [n for n, line in enumerate(lines) if line.startswith("FAILS ") and text in line]
    assert lines[at].endswith(" " + two)
    assert lines[at + 1] == f"       run {script} again"
    failed = len([line for line in lines if line.startswith("FAILS ")])
    assert f"{ALL - failed} of {ALL} checks hold" in lines
    [line] = process.err.splitlines()
    assert line.startswith(f"report.py: {failed} check")
    assert script in line
    assert line.endswith("report.py")
    assert (cause or "again on an idle machine, then report.py") in line
    assert len(lab.read("report.json")) == 7  # a copy is written all the same


def test_every_check_has_a_row_here():
    assert len({text for _, _, text, _, _ in BROKEN}) == len(report.CHECKS) == ALL


HOLDS = [  # at the border of what fails
    {"prefill.2.prompt_ms": 4303.75},
    {"cache.first.prompt_n": 1400, "cache.changed_prefix.prompt_n": 1260},
    {"sentence.ttft_ms": 217.0, "sentence.total_ms": 217.0},
    {"cancel.closed_at_ms": 500},
    # A fast server: half of the rest would have taken 5 ms, but a look at /slots takes longer.
    {"cancel.received_tokens": 251, "cancel.slot_idle_after_ms": 99.9},
    {"call.no_clock.0.prompt_n": 199, "call.clock_in_system.5.prompt_n": 1},
]


@pytest.mark.parametrize("changes", HOLDS)
def test_a_check_holds_at_its_border(lab, results, changes):
    shown(lab, results, changes)


def test_a_slot_that_is_busy_for_100_ms_fails_however_fast_the_server(lab, results):
    write(lab.out, results, {"cancel.received_tokens": 251, "cancel.slot_idle_after_ms": 100})
    process = lab.run("report.py")
    assert "100 < 100\n" in process.out
    assert "a relay that swallows a hang-up" in process.err


@pytest.mark.parametrize(("computed", "cause"), [(1337, ""), (1338, "second reused nothing: ")])
def test_a_hit_that_is_merely_slow_is_not_blamed_on_the_model(lab, results, computed, cause):
    write(lab.out, results, {"cache.second": {"prompt_n": computed, "ttft_ms": 5281.0}})
    assert (cause or "on an idle machine") in lab.run("report.py").err


@pytest.mark.parametrize(("turn_2", "cause"), [(180, "the turns of a call reused"), (179, "run ")])
def test_a_model_that_reuses_nothing_is_named_as_the_cause(lab, results, turn_2, cause):
    results["call"].update(
        no_clock=turns(200, turn_2, 280, 320, 360, 400),
        clock_in_message=turns(210, 260, 310, 360, 410, 460),
        clock_in_system=turns(210, 250, 290, 330, 370, 410),
    )
    write(lab.out, results)
    process = lab.run("report.py")
    assert f"{CHECKS} of {ALL} checks hold" in process.out
    assert process.err.startswith(f"report.py: 3 checks FAIL: {cause}")
    assert "run measure_cache.py --call again" in process.err


def test_counts_and_times_of_zero_are_no_traceback(lab, results):
    text, zero = json.dumps({**only_lab(results), "call": CALL}), {"call.interrupted": 3}
    zeros = json.loads(text, parse_int=lambda _: 0, parse_float=lambda _: 0)
    write(lab.out, zeros, {**zero, "prefill.1.docs": 4, "prefill.2.docs": 12})
    process = lab.run("report.py")
    assert process.returncode == 1
    assert re.match(r"report\.py: \d+ checks FAIL", process.err)


# ---------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("name", [*SCRIPTS, "props"])
def test_a_file_that_is_not_json_is_named(lab, results, name):
    write(lab.out, {**results, "report": "earlier"})
    script = SCRIPTS.get(name, "sse.py --server")
    (lab.out / f"{name}.json").write_bytes(b"[" * 100_000)
    lab.run_fails("report.py", words=(f"{name}.json is not JSON: run {script} again",))


@pytest.mark.parametrize("name", ["ttft", "props"])
def test_a_file_that_is_a_pipe_or_no_text_is_named_at_once(lab, results, name):
    write(lab.out, results)
    path = lab.out / f"{name}.json"
    path.write_bytes(b'{"half": \xff')
    lab.run_fails("report.py", words=(f"{path} (not UTF-8", "again"))
    path.unlink()
    os.mkfifo(path)
    process = lab.run("report.py")
    assert process.returncode == 1
    assert f"{path} (not a file)" in process.err


WRONG = [
    ("ttft.runs", {}, "ttft.json: runs.length is missing"),
    ("ttft.runs", LAB["ttft"]["runs"][:4], "ttft.json: runs.length is 4, not 5"),
    ("ttft.runs.1.ttft_ms", float("nan"), "ttft.json: runs.1.ttft_ms is nan, not a number"),
    ("prefill.2.prompt_n", "1290", "prefill.json: 2.prompt_n is '1290', not a number from 0 up"),
    ("prefill.1.docs", 5, "prefill.json: 1.docs is 5, not 4"),
    ("prefill.2", DELETE, "prefill.json: length is 2, not 1 or 3"),
    ("cache.second", DELETE, "cache.json: second.prompt_n is missing"),
    ("cache.second.ttft_ms", True, "cache.json: second.ttft_ms is True"),
    ("cache.changed_suffix", 5, "cache.json: changed_suffix.prompt_n is missing"),
    ("sentence.first_sentence", 5, "sentence.json: first_sentence is 5, not a text"),
    ("sentence.total_ms", -1, "sentence.json: total_ms is -1"),
    ("cancel", [], "cancel.json: max_tokens is missing"),
    ("call.interrupted", 4, "call.json: interrupted is 4, not 3 or null"),
    ("call.clock_not_kept.5", DELETE, "call.json: clock_not_kept.length is 5, not 6"),
    ("call.no_clock.0.cache_n", "6", "call.json: no_clock.0.cache_n is '6', not a number"),
    ("request.messages.1", DELETE, "request.json: messages.1.content is missing"),
]


@pytest.mark.parametrize(("way", "value", "words"), WRONG)
def test_a_value_that_is_not_what_it_must_be_is_named(lab, results, way, value, words):
    set_key(results, way, value)
    write(lab.out, {**results, "report": "earlier"})
    lab.run_fails("report.py", words=(words, f": run {SCRIPTS[way.split('.')[0]]} again"))


def leaves(value, way=()):
    """The way to every number and text in `value`."""
    lists = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, dict) else lists
    return [leaf for key, item in items for leaf in leaves(item, (*way, key))] or [way]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_key_of_a_file_is_looked_for(tmp_path, results, name):
    may_be_null = ("cache_n", "first_sentence_ms", "interrupted") if name == "call" else ()
    for way in leaves(results[name]):
        if way[-1] not in (*may_be_null, "role", "stream"):
            changed = copy.deepcopy({name: results[name]})
            set_key(changed, ".".join(map(str, (name, *way))), DELETE)
            write(tmp_path, changed)
            with pytest.raises(sse.Failure, match=f"{name}.json: .*{way[-1]} is missing or null"):
                report.load(str(tmp_path))


# ---------------------------------------------------------------------------- several runs


def test_a_folder_of_runs_has_medians_and_says_from_lowest_to_highest(lab, results):
    for number, ms in (1, 90.0), (2, 70.5), (3, 300.0), (4, 80.0), (10, 95.0):
        changes = {"ttft.ttft_p50": ms, "cancel.slot_idle_after_ms": ms}
        write(lab.out / str(number), results, changes)
    (lab.out / "11").mkdir()  # stopped before its first step had ended
    for number in (3, 10):
        (lab.out / str(number) / "cancel.json").unlink()
    process = lab.run("report.py")
    assert " ".join(process.out.split()).startswith(f"Where the time goes: {SMALL}, 5 runs first")
    rows = picture(process.out)
    assert rows["first token"] == (90.0, "p50 of 5, 70.5 to 300.0")  # and not UNSTEADY
    assert rows["stop after hang-up"] == (80.0, "p50 of 3, 70.5 to 90.0")
    assert rows["whole answer"] == (302.0, "p50 of 5, 302.0 to 302.0, 7.0 ms a token")
    assert rows["turn 6, clock in system"] == (2072.0, "p50 of 5, 2072.0 to 2072.0")
    assert lab.read("report.json") == {**SEVEN, "ttft_p50_ms": 90.0, "cancel_idle_ms": 80.0}
    (lab.out / "2" / "cancel.json").unlink()
    lab.run("report.py")
    assert lab.read("report.json")["cancel_idle_ms"] == 85.0  # of 90 and 80


def test_a_check_fails_where_it_fails_in_any_run_and_says_in_which(lab, results):
    for number, changes in enumerate(({}, {"cancel.closed_at_ms": 400}, {}), 1):
        write(lab.out / str(number), results, changes)
    changes = {"cancel.closed_at_ms": 300, "cache.second.prompt_n": 1486}
    write(lab.out / "10", results, changes)
    process = lab.run("report.py")
    assert process.returncode == 1
    closed = "500 <= 400\n       in run 2, 10 (VOICE_LLM_OUT=…/2): run measure_cancel.py again\n"
    assert re.search(f"FAILS  closed at 500 ms or later +{re.escape(closed)}", process.out)
    assert "\n       in run 10 (VOICE_LLM_OUT=…/10): run measure_cache.py again\n" in process.out
    assert f"{ALL - 2} of {ALL} checks hold" in process.out
    assert "second reused nothing" in process.err


def test_a_file_that_no_run_has_is_missing(lab, results):
    for number in "12":
        write(lab.out / number, results, less=("cancel",))
    words = f"missing in {lab.out}: cancel.json (measure_cancel.py makes it)"
    process = lab.run("report.py")
    assert (process.returncode, words in process.err) == (1, True)
    assert len(picture(process.out)) == 17
    assert not (lab.out / "report.json").exists()


# ---------------------------------------------------------------------------- two sides


def compare(lab, old, *options):
    """The lines of a comparison with `old`, and its table as {name: the cells behind it}."""
    lines = lab.run_ok("report.py", "--against", str(old), *options).out.splitlines()
    assert max(map(len, lines)) <= 80
    begin = next(n for n, line in enumerate(lines) if line.split() == ["old", "new", "change"])
    table = lines[begin + 1 : lines.index("", begin)]
    return lines, {line[:32].rstrip(): re.split(" {2,}", line[32:].strip()) for line in table}


NAMES = [
    *("first token", "whole answer", "first token, 12 docs", "tokens, 12 docs"),
    *("cache, same again", "first sentence", "stop after hang-up"),
    *("first token, 0 docs", "tokens, 0 docs", "first token, 4 docs", "tokens, 4 docs"),
    *("cache, first", "tokens, cache, first", "tokens, cache, same again"),
    *("cache, clock last", "tokens, cache, clock last"),
    *("cache, clock first", "tokens, cache, clock first", "next caller waits"),
    *("turn 6, no clock", "tokens, turn 6, no clock"),
    *("turn 6, clock in message", "tokens, turn 6, clock in message"),
    *("turn 6, clock not kept", "tokens, turn 6, clock not kept"),
    *("turn 6, clock in system", "tokens, turn 6, clock in system"),
    *("turn 4, interruption", "tokens, turn 4, interruption", "turn 6, first sentence"),
    *("ms per token, answer", "ms per token, 12 docs", "ms per token, cache, first"),
    "ms per token, cache, clock first",
]


def test_against_is_one_table_of_all_rows_with_report_json_first(lab, results, tmp_path):
    write(lab.out, results, {"ttft.runs.4.ttft_ms": 200.0}, at=2000)
    changes = {"ttft.ttft_p50": 0, "cache.second.ttft_ms": 51.0, "prefill.2.prompt_n": 2580}
    changes["cancel_prefill.next_ttft_ms"] = 123456.7
    write(tmp_path / "old", results, changes, at=1000, less=("call",))
    lines, table = compare(lab, tmp_path / "old")
    assert list(table) == NAMES
    assert table["first token"] == ["0.0", "92.0", "from 0", "UNSTEADY"]
    assert table["tokens, 12 docs"] == ["2580", "1290", "-50.0%"]
    assert table["cache, same again"] == ["51.0", "25.5", "-50.0%"]
    assert table["first token, 12 docs"] == ["4303.8", "4303.8", "=", "UNSTEADY"]
    assert table["whole answer"] == ["302.0", "302.0", "="]
    assert table["next caller waits"] == ["123456.7", "4892.0", "-96.0%", "UNSTEADY"]
    assert table["turn 6, no clock"] == ["not measured", "320.0"]
    assert table["ms per token, answer"] == ["7.00", "7.00", "="]
    assert table["ms per token, 12 docs"] == ["1.67", "3.34", "+100.0%", "UNSTEADY"]
    assert "One run on a side tells nothing about noise: ./run_all.sh --compare does." in lines


CHANGES = [  # the runs of the one side, of the other, what became of them
    ([90.0, 100.0], [100.0, 110.0], "~"),  # they touch
    ([90.0, 100.0], [100.1, 110.0], "+10.6%"),
    ([100.1, 110.0], [90.0, 100.0], "-9.6%"),
    ([90.0, 200.0], [100.0, 110.0], "~"),  # the one lies within the other
    ([100.0, 110.0], [90.0, 200.0], "~"),
    ([92.0, 92.0], [92.0, 92.0], "="),
    ([92.0, 92.0], [92.0, 92.001], "~"),
    ([92.0, 92.0], [92.001, 92.001], "+0.0%"),
    ([1.0, 2.0, 90.0], [100.0], "+4900.0%"),
]


@pytest.mark.parametrize(("old", "new", "change"), CHANGES)
def test_a_change_is_told_only_where_ranges_lie_apart(lab, results, tmp_path, old, new, change):
    for folder, values in (tmp_path / "old", old), (lab.out, new):
        for number, value in enumerate(values, 1):
            write(folder / str(number), results, {"sentence.first_sentence_ms": value})
    _, table = compare(lab, tmp_path / "old")
    assert table["first sentence"][2] == change


WORTH = [(5, 5, "1 in 126 "), (3, 3, "1 in 10 "), (2, 4, "1 in 7.5 "), (10, 10, "1 in 92,378 ")]


@pytest.mark.parametrize(("old", "new", "chance"), [*WORTH, (1, 5, ""), (5, 1, "")])
def test_it_says_what_ranges_apart_are_worth(lab, results, tmp_path, old, new, chance):
    for folder, number in (tmp_path / "old", old), (lab.out, new):
        for n in range(number):
            write(folder / str(n + 1), only_lab(results))
    text = " ".join(compare(lab, tmp_path / "old")[0])
    assert (chance or "tells nothing about noise") in text
    assert ("by chance alone" in text) == bool(chance)
    assert ("--compare" in text) != bool(chance)


@pytest.mark.parametrize(("second", "apart"), [(1003, True), (1002, False)])
def test_runs_all_made_before_the_others_exclude_no_drift(lab, results, tmp_path, second, apart):
    for early, late in (lab.out, tmp_path / "old"), (tmp_path / "old", lab.out):
        for number in (1, 2):
            write(early / str(number), only_lab(results), at=1000 + number)
            write(late / str(number), only_lab(results), at=second + 10 * (number - 1))
        text = " ".join(" ".join(compare(lab, tmp_path / "old")[0]).split())
        assert ("a machine that got slower or faster is not excluded" in text) == apart


def test_a_row_of_fewer_runs_says_so(lab, results, tmp_path):
    for number in "123":
        write(lab.out / number, results, less=("cache",) * (number == "2"))
        write(tmp_path / "old" / number, results)
    _, table = compare(lab, tmp_path / "old")
    assert table["cache, first"] == ["5280.0", "5280.0", "=", "of 3 and 2"]
    assert table["first token"] == ["92.0", "92.0", "="]


OTHER = [
    ("model_path", "other.gguf", "model"),
    ("default_generation_settings", {"n_ctx": 8192}, "context"),
    ("total_slots", 4, "slots"),
    ("build_info", "b9093", "build"),
    ("build_info", None, "build"),
]


@pytest.mark.parametrize(("key", "value", "name"), OTHER)
def test_against_says_what_is_not_the_same(lab, results, tmp_path, key, value, name):
    write(lab.out, results)
    write(tmp_path / "old", {**results, "props": {**PROPS, key: value}})
    lines, _ = compare(lab, tmp_path / "old")
    [line] = [line for line in lines if line.startswith("NOT THE SAME")]
    assert line.startswith(f"NOT THE SAME: {name}.")
    assert f"prompt the same: {len(sse.SYSTEM)} characters" in lines
    assert f"question the same: {len(sse.QUESTION)} characters" in lines
    assert f"old:{tmp_path}" in "".join("".join(lines).split())


def test_against_tells_whether_prompt_and_question_are_the_same(lab, results, tmp_path):
    write(lab.out, {**results, "request": asked("x" * 6012, "when?")})
    write(tmp_path / "old", {**results, "request": asked("y" * 6012, "where?")})
    lines, _ = compare(lab, tmp_path / "old")
    assert "prompt not the same: 6012 and 6012 characters" in lines
    assert "question not the same: 6 and 5 characters" in lines
    write(lab.out, results)
    (lab.out / "props.json").unlink()
    (tmp_path / "old" / "request.json").unlink()
    text = " ".join(" ".join(compare(lab, tmp_path / "old")[0]).split())
    for what in "the prompt is", "the question is":
        assert f"can't tell whether {what} the same: request.json is missing" in text
    server = "model, context, slots, build are the same: props.json is missing"
    assert f"can't tell whether {server}" in text
    assert "NOT THE SAME" not in text


def test_a_run_is_not_compared_with_itself(lab, results):
    write(lab.out, {**results, "report": "earlier"})
    lab.run_fails("report.py", "--against", str(lab.out / "."), words=("VOICE_LLM_OUT itself",))


def test_what_fails_fails_with_a_comparison_too(lab, results, tmp_path):
    write(tmp_path / "old", results)
    write(lab.out, results, {"cancel.closed_at_ms": 499})
    process = lab.run("report.py", "--against", str(tmp_path / "old"))
    assert process.returncode == 1
    assert "FAILS  closed at 500 ms" in process.out


def test_a_missing_or_broken_file_of_the_old_side_is_named(lab, results, tmp_path):
    old = tmp_path / "old"
    write(lab.out, {**results, "report": "earlier"})
    command = ("report.py", "--against", str(old))
    lab.run_fails(*command, words=("no folder", str(old)))
    old.mkdir()
    words = (str(old), "set --against", *(f"measure_{name}.py" for name in LAB))
    assert "VOICE_LLM_OUT" not in lab.run_fails(*command, words=words).line
    write(old, results, {"ttft.ttft_p50": "92"})
    lab.run_fails(*command, words=(str(old / "ttft.json") + ": ttft_p50",))
    write(old, results)
    (old / "prefill.json").unlink()
    process = lab.run(*command)
    assert process.returncode == 1
    assert f"missing in {old}: prefill.json (measure_prefill.py makes it)" in process.err
    assert re.search(r"first token, 12 docs +not measured +4303\.8\n", process.out)
    assert lab.read("report.json") == SEVEN


# ---------------------------------------------------------------------------- for GitHub


def test_markdown_is_one_table_under_one_line(lab, results):
    props = {**PROPS, "model_path": "a|b_`c`.gguf"}
    write(lab.out, {**results, "request": asked("x" * 6012), "props": props})
    process = lab.run_ok("report.py", "--markdown")
    lines = process.out.splitlines()
    assert lines[0] == r"a\|b\_\`c\`.gguf, context 4096, slots 1, build b11434, " + OWN
    assert lines[1:4] == ["", "|  | ms |  |", "| :-- | --: | :-- |"]
    table = [line.strip("| ").split(" | ") for line in lines[4 : lines.index("", 2)]]
    of_picture = picture(lab.run_ok("report.py").out).items()
    assert table == [[name, f"{ms:.1f}", words] for name, (ms, words) in of_picture]
    assert len(table) == 18
    assert "wrote" not in process.out
    assert f"{ALL} of {ALL} checks hold" in lines
    assert lab.read("report.json") == SEVEN


def test_markdown_of_a_comparison_has_the_same_rows(lab, results, tmp_path):
    command = ("report.py", "--markdown", "--against", str(tmp_path / "old"))
    write(lab.out, results)
    write(tmp_path / "old", results, {"cache.second.ttft_ms": 51.0})
    lines = lab.run_ok(*command).out.splitlines()
    assert lines[0] == f"{SMALL}, the lab's prompt"
    assert lines[2:4] == ["|  | old | new | change |  |", "| :-- | --: | --: | --: | :-- |"]
    table = [line.split(" | ")[0] for line in lines[4 : lines.index("", 2)]]
    assert table == [f"| {name}" for name in NAMES]
    assert "| cache, same again | 51.0 | 25.5 | -50.0% |  |" in lines
    assert [line for line in lines if "tells nothing about noise" in line]
    write(tmp_path / "old", {**results, "request": asked("x" * 6012)})
    head = lab.run_ok(*command).out.splitlines()[0]
    assert head == f"old: {SMALL}, {OWN}; new: {SMALL}, the lab's prompt"
    (lab.out / "request.json").unlink()
    assert lab.run_ok(*command).out.splitlines()[0].endswith(f"; new: {SMALL}")
