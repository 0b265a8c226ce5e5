"""Which server is measured, and what stands between: settings, keys, gateways, timers, folders."""

import ast
import json
import re
import signal
import sys
import time

import pytest
from conftest import STEPS, TOP, eventually
from faults import CACHE, CANCEL, EARLY, PREFILL, SENTENCE, STEP_1, STEP_2, TTFT

import sse

EVERY = [STEP_1, *STEPS, f"{CACHE} --call", EARLY]
QUICK = {"prompt_ms": 0.05, "token_ms": 12, "silence": 0.1}


def run_with(lab, before, script, *options):
    """Run a script in a Python that has run `before` first."""
    program = f"import runpy, sys\nsys.path[0] = {str(TOP)!r}\n{before}\n"
    program += f"sys.argv = {[script, *options]!r}\n"
    program += f"runpy.run_path({str(TOP / script)!r}, run_name='__main__')"
    process = lab.start(sys.executable, "-c", program)
    process.script = script
    return lab.ended(process)


# ---- one folder, one server


def real(lab, **props):
    """A server that is not simulated, by its own word."""
    return lab.serve(**QUICK, props={"model_path": "/models/a.gguf", "build_info": "b1", **props})


OTHERS = [
    ({"model_path": "/models/b.gguf"}, ("model /models/b.gguf", "/models/a.gguf")),
    ({"build_info": "b2"}, ("build b2", " b1")),
    ({"total_slots": 4}, ("slots 4", " 1:")),
    ({"default_generation_settings": {"n_ctx": 8192}}, ("context 8192", " 4096")),
]


@pytest.mark.parametrize(("props", "words"), OTHERS)
def test_a_step_on_another_server_than_the_folders_is_refused(lab, props, words):
    real(lab)
    lab.run_ok(*STEP_1.split())
    fake = real(lab, **props)
    words = (*words, str(lab.out), "another VOICE_LLM_OUT", "run_all.sh")
    for script in EVERY[1:] if "build_info" in props else [TTFT]:
        lab.run_fails(*script.split(), words=words)
    assert fake.requests == []


def test_step_1_takes_a_new_server_and_the_other_steps_follow(lab):
    real(lab)
    lab.run_ok(*STEP_1.split())
    real(lab, build_info="b2")
    lab.run_ok(*STEP_1.split())
    lab.run_ok(STEP_2)
    assert lab.read("props.json")["build_info"] == "b2"


def test_simulated_and_real_results_never_meet(lab):
    real(lab)
    lab.run_ok(*STEP_1.split())
    lab.serve(**QUICK)
    lab.run_fails(*STEP_1.split(), words=("holds results that are not simulated", "VOICE_LLM_OUT"))
    lab.run_fails(TTFT, words=("model simulated: a fake server without a model", "/models/a.gguf"))
    for path in lab.out.iterdir():
        path.unlink()
    (lab.out / "ttft.json").write_text("of some server")
    lab.run_fails(*STEP_1.split(), words=("holds results that are not simulated",))
    (lab.out / "ttft.json").unlink()
    lab.run_ok(*STEP_1.split())
    lab.run_ok(TTFT)
    real(lab)
    lab.run_fails(*STEP_1.split(), words=("holds simulated results", "VOICE_LLM_OUT"))


def test_without_props_in_the_folder_or_on_the_server_nothing_is_refused(lab):
    fake = real(lab)
    lab.run_ok(TTFT)
    assert "/props" not in fake.paths
    lab.run_ok(*STEP_1.split())
    fake.props = lambda: {"error": {"message": "no such path"}}
    lab.run_ok(TTFT)
    (lab.out / "props.json").write_text("[")
    lab.run_ok(TTFT)


# ---- a gateway


def test_slots_that_do_not_tell_are_asked_once(lab):
    fake = lab.serve(fault="slots_missing")
    lab.run_ok(TTFT)
    assert fake.paths.count("/slots") == 1


@pytest.mark.parametrize(("seconds", "longest"), [("60", 10), ("7", 7)])
def test_an_answer_that_can_be_done_without_is_waited_for_10_s(monkeypatch, seconds, longest):
    waited = []

    def get(path, seconds=None):
        waited.append(seconds)
        raise sse.NoAnswer("no answer")

    monkeypatch.setenv("VOICE_LLM_TIMEOUT", seconds)
    monkeypatch.setattr(sse, "get", get)
    monkeypatch.setattr(sse, "notes", {})
    monkeypatch.setattr(sse, "server_of_results", lambda: {"model": "a"})
    sse.wait_idle()
    sse.check_same_server()
    assert waited == [longest] * 2


# ---- a key


def test_a_key_is_sent_with_every_request_and_stands_nowhere(lab):
    lab.env["VOICE_LLM_API_KEY"] = "s3cret-key"
    fake = lab.serve(**QUICK, api_key="s3cret-key")
    for script in STEP_1, STEP_2, CACHE, CANCEL:
        process = lab.run_ok(*script.split())
        assert "s3cret" not in process.out + process.err
    assert set(fake.keys) == {"Bearer s3cret-key"}
    assert not [name for name, content in lab.files().items() if b"s3cret" in content]


def test_a_key_that_is_missing_is_named(lab):
    lab.serve(**QUICK, api_key="s3cret-key")
    lab.run_fails(TTFT, words=("401", "Invalid API Key", "set VOICE_LLM_API_KEY to its key"))


def test_a_key_that_an_error_repeats_is_not_shown(lab):
    lab.env["VOICE_LLM_API_KEY"] = "s3cret-key"
    lab.serve(fault="key_echoed")
    process = lab.run_fails(TTFT, words=("wrong key: Bearer ***",))
    assert "s3cret" not in process.err


@pytest.mark.parametrize("key", ["s3cret\n", "s3cret\r\nX: y", "s3crét"])
def test_a_key_that_can_not_stand_in_a_header_is_refused_by_name(lab, key):
    fake = lab.serve()
    lab.env["VOICE_LLM_API_KEY"] = key
    for command in [TTFT], [PREFILL, "--check"]:
        process = lab.run_fails(*command, words=("VOICE_LLM_API_KEY",))
        assert "s3cr" not in process.err
    assert fake.paths == []


# ---- other settings


def test_a_question_that_is_not_utf_8_is_named_before_anything_is_asked(lab):
    fake = lab.serve()
    lab.env["VOICE_LLM_QUESTION"] = b"Gr\xf6\xdfe?".decode("utf-8", "surrogateescape")
    for command in [STEP_2], [TTFT], [SENTENCE], [CACHE, "--call"], [PREFILL, "--check"]:
        lab.run_fails(*command, words=("VOICE_LLM_QUESTION is not UTF-8",))
    assert fake.paths == []


def test_a_question_is_sent_as_utf_8_in_an_ascii_locale_too(lab):
    fake = lab.serve()
    more = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    lab.env.update(more, VOICE_LLM_QUESTION="予約は？")
    lab.run_ok(STEP_2)
    assert fake.requests[0]["messages"][1]["content"] == "予約は？"


def test_an_old_python_is_named(lab):
    process = run_with(lab, "sys.version_info, sys.version = (3, 8, 18), '3.8.18 (main)'", TTFT)
    assert process.returncode == 1
    assert process.err == "this is Python 3.8.18: use 3.9 or later\n"


# ---- what step 2 leaves


def test_request_json_is_the_body_that_was_sent(lab):
    lab.env["VOICE_LLM_QUESTION"] = "予約は？"
    fake = lab.serve()
    lab.run_ok(STEP_2)
    text = (lab.out / "request.json").read_bytes()
    assert json.loads(text) == fake.requests[0]
    assert fake.bodies[0] == text
    assert "予約は？".encode() in text


def test_step_2_leaves_a_copy_of_itself_unless_one_is_there(lab):
    lab.serve()
    lab.run_ok(STEP_2)
    assert (lab.out / "sse.py").read_bytes() == (TOP / "sse.py").read_bytes()
    (lab.out / "sse.py").write_text("mine")
    lab.run_ok(STEP_2)
    assert (lab.out / "sse.py").read_text() == "mine"


# ---- timers and clocks


def test_a_deadline_whose_timer_fires_early_is_no_close_on_purpose(lab):
    lab.serve(fault="stall")
    lab.env["VOICE_LLM_TIMEOUT"] = "4"
    before = lab.write_earlier()
    early = "import threading\nTimer = threading.Timer\n"
    early += "threading.Timer = lambda seconds, call: Timer(seconds - 0.05, call)"
    lab.failed(run_with(lab, early, STEP_2), before, ("4 fragments but no [DONE] after 4 s",))


def test_sleep_between_two_looks_at_the_slots_is_noted(lab):
    fake = lab.serve(token_ms=4000)  # the token at work is still computed: 4 s after the close
    process = lab.start(CANCEL)
    assert eventually(lambda: fake.closed_ms and fake.paths[-1] == "/slots")
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: not fake.slot.processing)
    time.sleep(0.2)
    process.send_signal(signal.SIGCONT)
    process = lab.ended(process)
    assert process.returncode == 0, process.err
    assert "nobody saw whether the slot was busy, so it may have been idle" in process.err


# ---- a fast server


def test_a_server_that_sends_256_tokens_at_once_is_asked_for_2048(lab):
    fake, lab.cut = lab.serve(fault="fast"), 5  # 100 of 2048, and time for 256 at once
    process = lab.run_ok(CANCEL)
    assert [request["max_tokens"] for request in fake.requests] == [1, 256, 2048]
    result = lab.read("cancel.json")
    assert result["max_tokens"] == 2048
    assert 0 < result["received_tokens"] < 600
    assert "it had its 256 tokens before: once more, for 2048" in process.err


# ---- the README's code


def readme_code(name):
    """The code that the README shows between <!-- name --> and <!-- end -->."""
    text = (TOP / "README.md").read_text("utf-8")
    return text.partition(f"<!-- {name} -->\n```python\n")[2].partition("```\n<!-- end -->")[0]


def test_the_loop_of_the_readme_prints_every_fragment_with_its_time(lab):
    fake = lab.serve()
    port = fake.http.server_address[1]
    code = readme_code("loop").replace("8080", str(port))
    process = lab.run(sys.executable, "-c", code)
    assert process.returncode == 0, process.err
    times, texts = zip(*(line.split(" ms  ") for line in process.out.splitlines()))
    assert "".join(map(ast.literal_eval, texts)) == "Hello, how can I help you today?"
    assert list(map(float, times)) == sorted(map(float, times))


def test_the_interruption_of_the_readme_runs(lab):
    fake = lab.serve()
    section = (TOP / "README.md").read_text("utf-8").partition("An interruption, and the turn")[2]
    code = re.sub("(?m)^    ", "", section.partition("\n\n")[2].partition("\n\n")[0])
    process = lab.run(sys.executable, "-c", code, cwd=TOP)
    assert process.returncode == 0, process.err
    first, second = fake.requests
    assert first["min_p"] == 0.1
    assert second["messages"][2]["content"] == "Hello, how can I"
