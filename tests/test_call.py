"""measure_cache.py --call: four calls of six turns, an interruption, and where a clock belongs."""

import re

import pytest
from fake_server import ANSWERS, render, tokenize
from test_steps import DOCUMENTS, SYSTEM, body

import sse
from measure_cache import CALLER, Turn, measure_calls, note_reuse
from measure_sentence import first_sentence

CALL = ("measure_cache.py", "--call")
PLACES = ["no_clock", "clock_in_message", "clock_not_kept", "clock_in_system"]
LONG = "\n\n".join([SYSTEM, *DOCUMENTS])
QUICK = {"prompt_ms": 0.02, "token_ms": 1.0}


def clock(turn):
    return f"Current time: 14:{turn + 4:02}."


def calls_of(fake):
    """The requests of each call: {place: six of them}. The first of all is "hi"."""
    assert len(fake.requests) == 25
    return {place: fake.requests[1 + 6 * n : 7 + 6 * n] for n, place in enumerate(PLACES)}


def said(request, role):
    return [message["content"] for message in request["messages"] if message["role"] == role]


def notes(process):
    return [line for line in process.err.splitlines() if line.startswith("note: ")]


@pytest.fixture
def one_call(lab):
    """What a fake without a fault was asked, what was printed, and call.json."""
    fake = lab.serve(**QUICK)
    (lab.out).mkdir()
    (lab.out / "cache.json").write_text("earlier")
    process = lab.run_ok(*CALL)
    assert (lab.out / "cache.json").read_text() == "earlier"
    return fake, process, lab.read("call.json")


def test_what_is_sent_differs_in_nothing_but_the_clock(one_call):
    fake, _, _ = one_call
    assert fake.requests[0] == body(None, "hi", 4, True)
    more = {"ignore_eos": True, "timings_per_token": True}
    for place, requests in calls_of(fake).items():
        for turn, request in enumerate(requests, 1):
            first = body("", "", 48, True)
            assert request == {**first, "messages": request["messages"], **more}
            roles = [message["role"] for message in request["messages"]]
            assert roles == ["system", *["user", "assistant"] * (turn - 1), "user"]
            behind = f"\n{clock(turn)}" if place == "clock_in_system" else ""
            assert said(request, "system") == [LONG + behind]
            lines = list(CALLER[:turn])
            if place == "clock_in_message":
                lines = [f"{clock(n)}\n{line}" for n, line in enumerate(lines, 1)]
            if place == "clock_not_kept":
                lines[-1] = f"{clock(turn)}\n{lines[-1]}"
            assert said(request, "user") == lines


def test_the_history_has_the_answers_as_they_came_and_what_was_heard_of_one(one_call):
    fake, _, _ = one_call
    for requests in calls_of(fake).values():
        *_, last = requests
        answers = said(last, "assistant")
        assert [len(tokenize(text)) for text in answers] == [48, 48, 5, 48, 48]
        for turn, request in enumerate(requests):
            assert said(request, "assistant") == answers[:turn]


def test_turn_4_is_asked_at_once_behind_the_hang_up(one_call):
    fake, _, _ = one_call
    chats = [n for n, path in enumerate(fake.paths) if path.startswith("/v1")]
    at_once = [chats.index(n) for n, after in zip(chats, chats[1:]) if after == n + 1]
    assert at_once == [3, 9, 15, 21]  # the third turn of each call, behind "hi"


def test_the_interruption_closes_the_connection(lab):
    fake = lab.serve(**QUICK, fault="stall_in_turn_3")
    lab.run_ok(*CALL)
    assert lab.read("call.json")["interrupted"] == 3
    assert len([line for line in fake.log_lines if "cancel task" in line]) == 4


def test_call_json_has_six_turns_of_each_call(one_call):
    fake, _, result = one_call
    assert list(result) == ["interrupted", *PLACES]
    assert result["interrupted"] == 3
    keys = ["turn", "prompt_n", "cache_n", "ttft_ms", "first_sentence_ms"]
    sent = iter(fake.requests[1:])
    for place in PLACES:
        assert [turn["turn"] for turn in result[place]] == [1, 2, 3, 4, 5, 6]
        for turn in result[place]:
            assert list(turn) == keys
            prompt = tokenize(render(next(sent)["messages"]))
            assert turn["prompt_n"] + turn["cache_n"] == len(prompt)
            if turn["turn"] == 3:
                assert turn["first_sentence_ms"] is None
            else:
                assert 0 < turn["ttft_ms"] < turn["first_sentence_ms"]


def test_a_turn_computes_what_is_new_and_what_stands_behind_the_clock(one_call):
    _, _, result = one_call
    cold, *later = result["no_clock"]
    assert cold["prompt_n"] > 1400
    for before, turn in zip(result["no_clock"], later):
        heard = 5 if before["turn"] == 3 else 48
        new = sum(turn[key] - before[key] for key in ("prompt_n", "cache_n")) - heard
        assert turn["prompt_n"] == new
    last = [result[place][5]["prompt_n"] for place in PLACES]
    assert last == sorted(last)
    assert last[2] > last[0] + 48  # the last answer, which stands behind a line that has changed
    in_system = [turn["prompt_n"] for turn in result["clock_in_system"]]
    assert in_system == sorted(in_system)
    assert in_system[5] > 4 * 48


def test_a_line_for_each_turn_a_column_for_each_place_and_the_first_sentences(one_call):
    _, process, result = one_call
    lines = process.out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    for number in range(6):
        cells = [result[place][number] for place in PLACES]
        row = [f"{cell['ttft_ms']:.1f} ({cell['prompt_n']})" for cell in cells]
        assert " ".join(lines[2 + number].split()) == " ".join([str(number + 1), *row])
        sentence_ms = result["no_clock"][number]["first_sentence_ms"]
        answer = ANSWERS.get(CALLER[number], "Hello, how can I help you today?")
        sentence = re.match("[^.?]+[.?]", answer)[0]
        words = f"{sentence_ms:.1f} ms {sentence}" if sentence_ms else ""
        assert " ".join(lines[9 + number].split()) == f"{number + 1} {words or 'interrupted'}"
    progress = [line for line in process.err.splitlines() if ", turn " in line]
    assert len(progress) == 24
    assert re.fullmatch(
        r"no clock, turn 3 \.\.\. \d+ tokens computed, \d+ reused, [\d.]+ ms, interrupted",
        progress[2],
    )


# ---- what a note says


MODEL = ["from turn 2 on every turn computed nearly everything again", "sliding window"]
ANSWER = ["turn 2, 3, 4, 5, 6 computed the answer before it again", "template"]
AGAIN = [
    ("recomputes", MODEL, ["--no-cache-prompt", "another slot"]),
    ("forgets_answers", ANSWER, ["other tokens", "checkpoint"]),
]


@pytest.mark.parametrize(("fault", "turns", "causes"), AGAIN)
def test_what_is_computed_again_is_noted_with_turns_and_causes(lab, fault, turns, causes):
    lab.serve(**QUICK, fault=fault)
    [note] = [n for n in notes(lab.run_ok(*CALL)) if "computed" in n]
    for words in turns + causes:
        assert words in note


def test_answers_of_different_lengths_are_noted_with_both_numbers(lab):
    lab.serve(**QUICK, ignores=["ignore_eos"])
    process = lab.run_ok(*CALL)
    [note] = [n for n in notes(process) if "ignore_eos" in n]
    [shortest, longest] = map(int, re.findall(r"had (\d+) to (\d+) tokens", note)[0])
    assert 5 < shortest < longest <= 48
    assert lab.read("call.json")["interrupted"] == 3


def test_an_answer_that_ended_before_the_caller_broke_in_makes_interrupted_null(lab):
    lab.serve(**QUICK, fault="short")
    process = lab.run_ok(*CALL)
    result = lab.read("call.json")
    assert result["interrupted"] is None
    assert [n for n in notes(process) if "turn 3 had ended before the caller broke in" in n]
    assert result["no_clock"][2]["first_sentence_ms"] is not None


def test_a_server_that_does_not_tell_what_it_reused_gives_null(lab):
    lab.serve(**QUICK, fault="cached_untold")
    lab.run_ok(*CALL)
    result = lab.read("call.json")
    assert {turn["cache_n"] for place in PLACES for turn in result[place]} == {None}


@pytest.mark.parametrize(("computed", "told"), [(10 + 24, False), (10 + 25, True)])
def test_more_than_half_of_the_answer_before_is_noted(monkeypatch, computed, told):
    monkeypatch.setattr(sse, "notes", {})
    counts = [(1000, 0), (computed, 1058 - computed)]  # 10 tokens are new, 48 are the answer's
    figures = [{"prompt_n": prompt_n, "cache_n": cache_n} for prompt_n, cache_n in counts]
    note_reuse([Turn(turn, "", "", 48, False) for turn in figures])
    assert ("answer again" in sse.notes) == told


def test_what_waits_behind_a_hang_up_earns_no_note_for_it(lab, monkeypatch):
    lab.serve(**QUICK)
    for name in "URL", "OUT", "KB":
        monkeypatch.setenv(f"VOICE_LLM_{name}", lab.env[f"VOICE_LLM_{name}"])
    noted, clocks = [], sse.note_clocks
    monkeypatch.setattr(sse, "note_clocks", lambda *told: noted.append(told))
    measure_calls(["A document."])
    assert [behind for _, _, behind in noted] == [False, False, True, False, False] * 4
    monkeypatch.setattr(sse, "notes", {})
    answer, chunks, _ = noted[0]
    answer.timings = {"prompt_ms": 90_000.0}
    clocks(answer, chunks, True)
    assert sse.notes == {}


# ---- what is void


def test_a_first_turn_that_was_warm_is_void(lab):
    fake = lab.serve(**QUICK)
    fake.slot.kept_prompt = tokenize(render([{"role": "system", "content": LONG}]))
    words = ("turn 1 of no_clock was answered from a cache already", "--cache-ram 0")
    lab.run_fails(*CALL, words=words)


def test_a_history_that_outgrows_the_context_is_named_with_its_turn(lab):
    lab.serve(**QUICK, n_ctx=1690)
    lab.run_fails(*CALL, words=("no_clock, turn 3: ", "context size", "shorten the prompt"))


def test_an_interrupted_answer_without_timings_has_no_figures(lab):
    lab.serve(**QUICK, ignores=["timings_per_token"])
    lab.run_fails(*CALL, words=("no_clock, turn 3: ", "timings lack prompt_n"))


# ---- what the caller says


def test_the_lines_of_a_question_are_said_in_turn_and_then_again(lab):
    lab.env["VOICE_LLM_QUESTION"] = "Hello?\n\n  土曜日は開いていますか？\r\n"
    fake = lab.serve(**QUICK)
    lab.run_ok(*CALL)
    lines = ["Hello?", "土曜日は開いていますか？"]
    assert said(calls_of(fake)["no_clock"][5], "user") == lines * 3
    fake.requests.clear()
    lab.run_ok("measure_sentence.py")
    assert said(fake.requests[0], "user") == lines[:1]


# ---- where a sentence ends

SENTENCES = [
    (["Come at 9. Bring", " ID."], "Come at 9.", 0),
    (["Come at 9.", " Bring ID."], "Come at 9.", 1),
    (["Come", "?", "\n", "Yes"], "Come?", 2),
    (["It is 3.5", " km! ", "Go."], "It is 3.5 km!", 1),
    (["Only one sentence", "."], "Only one sentence.", None),
    (["No mark at all"], "No mark at all", None),
    (["Wait...", " what"], "Wait...", 1),
    ([" Leading space. ", "More."], " Leading space.", 0),
    (["Yes.\u3000次"], "Yes.", 0),
    (["はい", "。", "土曜日は午前九時からです。"], "はい。", 1),
    (["はい。土曜", "日は"], "はい。", 0),
    (["一日3.5", "mgです", "。"], "一日3.5mgです。", 2),
    (["本当", "ですか？は", "い"], "本当ですか？", 1),
    (["はい！", "Yes. "], "はい！", 0),
    (["ﾊｲ｡", "次"], "ﾊｲ｡", 0),
    (["Yes. ", "はい。"], "Yes.", 0),
    (["OK.はい。", " "], "OK.はい。", 0),
]


@pytest.mark.parametrize(("texts", "sentence", "fragment"), SENTENCES)
def test_a_sentence_ends_at_a_mark_with_white_space_or_a_japanese_one(texts, sentence, fragment):
    chunks = [{"t_ms": 10.0 * n, "text": text} for n, text in enumerate(texts)]
    assert first_sentence(chunks, 99.0) == (sentence, 99.0 if fragment is None else 10.0 * fragment)


def test_a_japanese_answer_has_a_first_sentence(lab):
    lab.serve(fault="split_characters")
    process = lab.run_ok("measure_sentence.py")
    assert lab.read("sentence.json")["first_sentence"] == "診療は九時から。"
    assert "no sentence" not in process.err


# ---- no documents


def test_without_documents_only_the_system_prompt_is_sent(lab):
    lab.env["VOICE_LLM_KB"] = "none"
    fake, lab.cut = lab.serve(prompt_ms=50, silence=0.1), 1  # 3 s for the prompt
    lab.run_ok("measure_prefill.py", "--check")
    assert fake.requests == []
    lab.run_ok("measure_cancel.py", "--during-prefill")
    assert lab.read("cancel_prefill.json")["docs"] == 0
    fake.slot.prompt_ms = 0.1
    lab.run_ok("measure_prefill.py")
    [row] = lab.read("prefill.json")
    assert row["docs"] == 0
    lab.run_ok("measure_cache.py")
    lab.run_ok(*CALL)
    systems = {text for request in fake.requests for text in said(request, "system")}
    times = {text for text in systems if "Current time" in text}
    assert systems - times == {SYSTEM}
    assert all(SYSTEM in text and len(text) < 100 for text in times)
