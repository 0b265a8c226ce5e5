#!/usr/bin/env python3
"""Step 8: the key figures in one file, and a picture of where the time goes.

Reads what the measurements wrote, asks no server, and writes report.json:

  ttft_p50_ms, total_p50_ms        from ttft.json
  ttft_12docs_ms, prompt_n_12docs  from the last of prefill.json, if it has 12
  cache_ttft_ms                    from cache.json, second
  first_sentence_ms                from sentence.json
  cancel_idle_ms                   from cancel.json, slot_idle_after_ms

Then it prints every time with a bar on one scale, and how many checks hold:
what must be so within one run. A check that FAILS is listed with its two
figures, and makes the exit status 1. UNSTEADY marks times of a single run that
vary too much. Where a file is missing, the others are shown, report.json is
not written, and the exit status is 1. A call.json or cancel_prefill.json that
is older than all the other results is of an earlier run, and is not shown.

A folder with the subfolders 1, 2, ... holds several runs: a figure is the
median of those that have it ("p50 of 4"), and a check fails where it fails in
any. --against compares two folders of either kind. The change of a figure is
~ where the ranges from the lowest to the highest run overlap, = where all runs
have the same, and else in percent.
"""

import itertools
import json
import math
import operator
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from collections import namedtuple

import sse
from measure_cache import NEARLY_ALL, TURNS
from measure_cancel import CUT
from measure_prefill import COUNTS
from measure_ttft import RUNS

LAB = ("ttft", "prefill", "cache", "sentence", "cancel")
PAST_THE_LAB = ("call", "cancel_prefill")
SCRIPTS = {name: f"measure_{name}.py" for name in LAB}  # what makes which file
SCRIPTS.update(call="measure_cache.py --call", cancel_prefill="measure_cancel.py --during-prefill")
SCRIPTS.update(props="sse.py --server", request="sse.py")
ENOUGH = 200  # tokens of a call's first turn: fewer cost too little to tell a hit from a miss
FLOOR_MS = 100  # the notice of a hang-up and a look at /slots may take as much on any server

# figures: {"cache.second.prompt_n": 1, …}; times: when each file of results was written.
Run = namedtuple("Run", "folder figures times")


# ---- the files
def one_of(*values):
    return (lambda value: value in values), " or ".join(map(json.dumps, values))


NUMBER = sse.is_number, "a number from 0 up"
MAYBE = (lambda value: value is None or sse.is_number(value)), "a number from 0 up or null"
TEXT = (lambda value: isinstance(value, str)), "a text"
CALLS = "call.no_clock call.clock_in_message call.clock_not_kept call.clock_in_system"
CALL_TURNS = " ".join(f"{call}.{turn}" for call in CALLS.split() for turn in range(TURNS))
CACHES = "cache.first cache.second cache.changed_suffix cache.changed_prefix"
SHAPES = (  # what must be in the files: where, its keys, what each of them is
    ("ttft", "ttft_p50 total_p50", NUMBER),
    ("ttft.runs", "length", one_of(RUNS)),
    (" ".join(f"ttft.runs.{run}" for run in range(RUNS)), "ttft_ms total_ms tokens", NUMBER),
    ("prefill", "length", one_of(1, len(COUNTS))),
    *((f"prefill.{row}", "docs", one_of(docs)) for row, docs in enumerate(COUNTS)),
    ("prefill.0 prefill.1 prefill.2", "prompt_n prompt_ms ttft_ms", NUMBER),
    (CACHES, "prompt_n ttft_ms", NUMBER),
    ("sentence", "ttft_ms first_sentence_ms total_ms", NUMBER),
    ("sentence", "first_sentence text", TEXT),
    ("cancel", "max_tokens received_tokens closed_at_ms slot_idle_after_ms", NUMBER),
    ("call", "interrupted", one_of(3, None)),
    (CALLS, "length", one_of(TURNS)),
    (CALL_TURNS, "turn prompt_n ttft_ms", NUMBER),
    (CALL_TURNS, "cache_n first_sentence_ms", MAYBE),
    ("cancel_prefill", "docs closed_at_ms next_ttft_ms next_prompt_ms", NUMBER),
    ("request.messages.0 request.messages.1", "content", TEXT),
)
OPTIONAL = ("cache.changed_suffix", "prefill.1", "prefill.2")


def flat(value, way):
    """Everything in `value` by the way that leads to it: {"cache.second": {…}, …}."""
    found = {way: value}
    if isinstance(value, list):
        value = {**dict(enumerate(value)), "length": len(value)}
    for key, item in value.items() if isinstance(value, dict) else ():
        found.update(flat(item, f"{way}.{key}"))
    return found


def read(path, name):
    """The look-up of one file. Raises sse.Failure naming the file, and the key that is wrong."""
    again = f"run {SCRIPTS[name]} again"
    try:
        found = flat(json.loads(sse.read_text(path, again)), name)
    except (ValueError, RecursionError):
        raise sse.Failure(f"{path} is not JSON: {again}") from None
    for places, names, (fits, kind) in SHAPES:
        for place, key in itertools.product(places.split(), names.split()):
            way = f"{place}.{key}"
            needed = place.split(".")[0] == name and (place in found or place not in OPTIONAL)
            if needed and not fits(value := found.get(way)):
                wrong = "is missing or null" if value is None else f"is {value!r:.40}, not {kind}"
                raise sse.Failure(f"{path}: {way[len(name) + 1 :]} {wrong}: {again}")
    return found


def load_run(folder, without):
    """The files of one run but those in `without` → Run. Raises sse.Failure."""
    paths = {name: os.path.join(folder, f"{name}.json") for name in SCRIPTS if name not in without}
    times = {name: os.path.getmtime(path) for name, path in paths.items() if os.path.exists(path)}
    oldest = min((times[name] for name in LAB if name in times), default=math.inf if without else 0)
    for name in PAST_THE_LAB:
        if times.get(name, oldest) < oldest - 1:
            del times[name]  # of an earlier run: this one has not measured it
    figures = {way: it for name in times for way, it in read(paths[name], name).items()}
    derive(figures)
    return Run(folder, figures, [times[name] for name in LAB + PAST_THE_LAB if name in times])


def load(folder, without=()):
    """The runs in the subfolders 1, 2, … of `folder`, or the one in itself → [Run, …]."""
    names = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else []
    numbers = sorted((name for name in names if re.fullmatch("[0-9]+", name)), key=int)
    runs = [load_run(os.path.join(folder, number), without) for number in numbers]
    return [run for run in runs if run.times] or [load_run(folder, without)]


def missing(folder, runs, setting):
    """What to say of the lab's files that none of `runs` has; "" if there is nothing to say."""
    names = [name for name in LAB if runs and not known(runs, name)]
    what = f"missing in {folder}" if os.path.isdir(folder) else f"no folder {folder} with results"
    made = ", ".join(f"{name}.json ({SCRIPTS[name]} makes it)" for name in names)
    fake = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake-results")
    other = f"; the simulated ones are in {fake}" if os.path.isdir(fake) else ""
    do = f"run these, then report.py, or set {setting} to the folder of the results{other}"
    return f"{what}: {made}: {do}" if names else ""


# ---- the rows
# A figure: its name; its way in the look-up f; words on a single run, phrases with commas between;
# its key in report.json, if it has one; its unit.
Row = namedtuple("Row", "name way words report unit", defaults=("", "", "ms"))
FORMATS = {"ms": ".1f", "tokens": ".10g", "ms per token": ".2f"}  # of each unit
FIVE = "p50 of 5, {f[AT][0]:.1f} to {f[AT][4]:.1f}"
PREFILL = "{f[AT.tokens]} at {f[AT.each]:.2f} ms, prefill {f[AT.share]:.0%}"
COMPUTED = "{f[AT.computed]}"
HIT = COMPUTED + ", first: {f[cache.first.prompt_n]}"
SPEECH = "speech, {f[sentence.after]:.1f} after the first token"
CLOSED = "closed at {f[cancel.closed_at_ms]:.1f} with {f[cancel.received]}"
NEXT = "hang-up in prefill, its own: {f[cancel_prefill.next_prompt_ms]:.1f}"
PARTS = "{f[call.no_clock.5.ttft_ms]:.1f} first token, {f[call.no_clock.5.after]:.1f} generation"


def request(name, at, words, report="", report_tokens=""):
    """The two rows of one request: its first token, and the tokens that were computed for it."""
    tokens = "tokens, " + name.replace("first token, ", "")
    yield Row(name, f"{at}.ttft_ms", words.replace("AT", at), report)
    yield Row(tokens, f"{at}.prompt_n", "", report_tokens, "tokens")


ROWS = (
    Row("first token", "ttft.ttft_p50", FIVE.replace("AT", "ttft.firsts"), "ttft_p50_ms"),
    Row("whole answer", "ttft.total_p50", FIVE.replace("AT", "ttft.totals"), "total_p50_ms"),
    *request("first token, 0 docs", "prefill.0", PREFILL),
    *request("first token, 4 docs", "prefill.1", PREFILL),
    *request("first token, 12 docs", "prefill.2", PREFILL, "ttft_12docs_ms", "prompt_n_12docs"),
    *request("cache, first", "cache.first", COMPUTED),
    *request("cache, same again", "cache.second", HIT, "cache_ttft_ms"),
    *request("cache, clock last", "cache.changed_suffix", HIT),
    *request("cache, clock first", "cache.changed_prefix", HIT),
    Row("first sentence", "sentence.first_sentence_ms", SPEECH, "first_sentence_ms"),
    Row("stop after hang-up", "cancel.slot_idle_after_ms", CLOSED, "cancel_idle_ms"),
    Row("next caller waits", "cancel_prefill.next_ttft_ms", NEXT),
    *request("turn 6, no clock", "call.no_clock.5", COMPUTED),
    *request("turn 6, clock in message", "call.clock_in_message.5", COMPUTED),
    *request("turn 6, clock not kept", "call.clock_not_kept.5", COMPUTED),
    *request("turn 6, clock in system", "call.clock_in_system.5", COMPUTED),
    *request("turn 4, interruption", "call.turn_4", COMPUTED),
    Row("turn 6, first sentence", "call.no_clock.5.first_sentence_ms", PARTS),
    Row("ms per token, answer", "ttft.each", unit="ms per token"),
    Row("ms per token, 12 docs", "prefill.2.cost", unit="ms per token"),
    Row("ms per token, cache, first", "cache.first.cost", unit="ms per token"),
    Row("ms per token, cache, clock first", "cache.changed_prefix.cost", unit="ms per token"),
)


def identity(props):
    """What props.json tells of the server → {"model": file, "context": "context 4096", …}."""
    props = props if isinstance(props, dict) else {}
    told = {key: f"{key} {value}" for key, value in sse.server_of(props).items()}
    names = (os.path.basename(str(props.get(key) or "")) for key in ("model_path", "model_alias"))
    model, alias, *_ = [*filter(None, dict.fromkeys(names)), "", ""]
    once = {"model": model, "build": ""}  # it is simulated, and says so in every key
    model += f" ({alias})" if alias else ""
    return {**told, **(once if sse.SIMULATED in once.values() else {"model": model})}


def derive(f):
    """Add to the look-up of a run what follows from its figures."""
    f.update({f"server.{key}": text for key, text in identity(f.get("props")).items()})
    if f.get("call.interrupted"):
        f.update(flat(f["call.no_clock.3"], "call.turn_4"))
    if f.get("call.no_clock.0.prompt_n", 0) >= ENOUGH:
        for key in "prompt_n", "ttft_ms":
            f[f"call.first.{key}"], *later = (turn[key] for turn in f["call.no_clock"])
            f[f"call.least.{key}"], f[f"call.most.{key}"] = min(later), max(later)
        f["call.nearly_all"] = NEARLY_ALL * f["call.first.prompt_n"]
        f["call.in_message"] = f["call.clock_in_message.5.prompt_n"]
        f["call.in_system"] = f["call.clock_in_system.5.prompt_n"]
    for at in [row.way[:-9] for row in ROWS if row.way.endswith(".prompt_n") and row.way in f]:
        tokens, ttft_ms, reused = (f[at].get(key) for key in ("prompt_n", "ttft_ms", "cache_n"))
        of = "" if reused is None else f"{tokens} of "
        f[f"{at}.tokens"] = sse.plural(tokens, "token")
        f[f"{at}.computed"] = f"{of}{sse.plural(tokens + (reused or 0), 'token')} computed"
        f[f"{at}.cost"] = ttft_ms / max(tokens, 1)
        f[f"{at}.each"] = f[at].get("prompt_ms", 0) / max(tokens, 1)
        f[f"{at}.share"] = f[at].get("prompt_ms", 0) / max(ttft_ms, 0.001)
    for at in "sentence", "call.no_clock.5":
        if f.get(f"{at}.first_sentence_ms") is not None:
            f[f"{at}.after"] = f[f"{at}.first_sentence_ms"] - f[f"{at}.ttft_ms"]
    if "ttft" in f:
        runs = [[run[key] for key in ("ttft_ms", "total_ms", "tokens")] for run in f["ttft.runs"]]
        f["ttft.firsts"], f["ttft.totals"], _ = map(sorted, zip(*runs))
        f["ttft.third"], f["ttft.third_total"] = f["ttft.firsts"][2], f["ttft.totals"][2]
        f["ttft.latest"], f["ttft.its_end"], _ = min(runs, key=lambda run: run[1] - run[0])
        costs = [(total - first) / (tokens - 1) for first, total, tokens in runs if tokens > 1]
        f["ttft.each"] = statistics.median(costs) if costs else None
    if "cache" in f:
        f["cache.limit"] = NEARLY_ALL * f["cache.first.prompt_n"]
        f["cache.prefix_n"] = f["cache.changed_prefix.prompt_n"]
        f["cache.prefix_ms"] = f["cache.changed_prefix.ttft_ms"]
    if "sentence" in f:
        first = f["sentence.first_sentence"]
        f["sentence.length"] = len(first)
        f["sentence.begins"] = len(first) * f["sentence.text"].startswith(first)
    if "cancel" in f:
        received = f["cancel.received_tokens"]
        rest_ms = (f["cancel.max_tokens"] - received) * f["cancel.closed_at_ms"] / max(received, 1)
        f["cancel.received"] = sse.plural(received, "fragment")
        f["cancel.half_ms"] = max(FLOOR_MS, 0.5 * rest_ms)


def unsteady(f):
    """The ways in the look-up of a single run to what one more measurement may change."""
    times = {"ttft.ttft_p50": f.get("ttft.firsts"), "ttft.total_p50": f.get("ttft.totals")}
    ways = {way for way, spent in times.items() if spent and spent[-1] > 2 * spent[0]}
    # Cold prompts of about the same length should cost the same a token; each was measured once.
    cold = [at for at in ("prefill.2", "cache.first", "cache.changed_prefix") if at in f]
    for pair in itertools.combinations(cold, 2):
        tokens, costs = ([f[f"{at}.{key}"] for at in pair] for key in ("prompt_n", "cost"))
        if max(tokens) <= 2 * min(tokens) and max(costs) > 1.5 * min(costs):
            ways |= {f"{at}.{key}" for at in pair for key in ("ttft_ms", "cost")}
    if "cancel_prefill" in f and "cache" in f:
        longest = f["cache.first.ttft_ms"] + f["cancel_prefill.next_prompt_ms"]
        if f["cancel_prefill.next_ttft_ms"] > 1.5 * longest:
            ways.add("cancel_prefill.next_ttft_ms")
    return ways


# A row of some runs: the values of those that have it, their median, words, whether to rely on it.
Figure = namedtuple("Figure", "row values median words steady")


def known(runs, way):
    return [run.figures[way] for run in runs if run.figures.get(way) is not None]


def figures(runs):
    """What `runs` measured → {name of the row: Figure}, in the order in which they are shown."""
    table, f = {}, runs[0].figures if len(runs) == 1 else {}
    doubtful = unsteady(f)
    for row in ROWS:
        if values := known(runs, row.way):
            words = f"p50 of {len(values)}, {min(values):.1f} to {max(values):.1f}"
            words = row.words.format(f=f) if f else words
            if row.name == "whole answer" and known(runs, "ttft.each"):
                words += f", {statistics.median(known(runs, 'ttft.each')):.1f} ms a token"
            steady = row.way not in doubtful
            words += ", UNSTEADY" * (not steady)
            table[row.name] = Figure(row, values, statistics.median(values), words, steady)
    return table


# ---- what must hold
REUSES = "the model (sliding window, recurrent memory: --swa-full helps some) or a flag of "
REUSES += "llama-server (--no-cache-prompt)"
RELAY = f"the server may have gone on, as behind a relay that swallows a hang-up: {sse.ITSELF}"
KEPT = "a cache kept the prompt: start llama-server with --cache-ram 0 and -np 1"
# What a failure may come from: two figures that relate so where it does, and the words for it.
NO_DOCS = "prefill 0 <= 0", "the documents add no tokens: look into VOICE_LLM_KB"
MISS = "cache limit <= second.prompt_n", f"second reused nothing: {REUSES}"
WARM = "cache prefix_n < limit", KEPT
WENT_ON = "cancel received_tokens < max_tokens", RELAY
AGAIN = "call nearly_all <= least.prompt_n", f"the turns of a call reused nothing: {REUSES}"

CHECKS = (  # a sentence; a file, and how two of its figures relate; what a failure may come from
    ("the first token comes before the end, in every run", "ttft latest < its_end"),
    ("ttft_p50 is the third of the five sorted runs", "ttft ttft_p50 == third"),
    ("total_p50 is the third of the five sorted runs", "ttft total_p50 == third_total"),
    ("4 documents are more tokens than none", "prefill 0.prompt_n < 1.prompt_n", NO_DOCS),
    ("12 documents are more tokens than 4", "prefill 1.prompt_n < 2.prompt_n", NO_DOCS),
    ("4 documents delay the first token", "prefill 0.ttft_ms < 1.ttft_ms"),
    ("12 documents delay it more", "prefill 1.ttft_ms < 2.ttft_ms"),
    ("no documents: prefill is over at the first token", "prefill 0.prompt_ms <= 0.ttft_ms"),
    ("4 documents: prefill is over at the first token", "prefill 1.prompt_ms <= 1.ttft_ms"),
    ("12 documents: prefill is over at the first token", "prefill 2.prompt_ms <= 2.ttft_ms"),
    ("a hit computes fewer tokens than first", "cache second.prompt_n < first.prompt_n", MISS),
    ("a hit is faster than first", "cache second.ttft_ms < first.ttft_ms", MISS),
    (f"changed prefix: {NEARLY_ALL} of first is computed again", "cache limit <= prefix_n", WARM),
    ("changed prefix: slower than a hit", "cache second.ttft_ms < prefix_ms", MISS, WARM),
    ("first token, then first sentence", "sentence ttft_ms <= first_sentence_ms"),
    ("first sentence, then the end", "sentence first_sentence_ms <= total_ms"),
    ("the text starts with the sentence (characters)", "sentence begins == length"),
    ("fragments came before the close", "cancel 0 < received_tokens"),
    ("the close came before the last token", "cancel received_tokens < max_tokens"),
    (f"closed at {CUT * 1000:.0f} ms or later", f"cancel {CUT * 1000:.0f} <= closed_at_ms"),
    ("idle before half of the rest was due", "cancel slot_idle_after_ms < half_ms", WENT_ON),
    ("turns 2 to 6 compute less than turn 1", "call most.prompt_n < first.prompt_n", AGAIN),
    ("turns 2 to 6 have their first token sooner", "call most.ttft_ms < first.ttft_ms", AGAIN),
    ("turn 6: in system computes more than in message", "call in_message < in_system", AGAIN),
)
SIGNS = {"<": operator.lt, "<=": operator.le, "==": operator.eq}

# A check of some runs: two figures, of the first that fails, if one does; the runs that fail.
Check = namedtuple("Check", "file text left sign right failed causes")


def relate(f, relation):
    """Two figures of a file → (left, sign, right, does that hold); () where one is missing."""
    file, left, sign, right = relation.split()
    left, right = (int(n) if n.isdecimal() else f.get(f"{file}.{n}") for n in (left, right))
    return () if None in (left, right) else (left, sign, right, SIGNS[sign](left, right))


def checks(runs):
    """What must hold in each of `runs`, as far as their files tell → [Check, …]."""
    table = []
    for text, relation, *causes in CHECKS:
        found = [(run, two) for run in runs if (two := relate(run.figures, relation))]
        failed = [(run, related) for run, related in found if not related[-1]]
        for run, related in (failed or found)[:1]:
            words = [text for when, text in causes if relate(run.figures, when)[-1]]
            names = [os.path.basename(run.folder) for run, _ in failed]
            table.append(Check(relation.split()[0], text, *related[:3], names, words[:1]))
    return table


def check_lines(table, several):
    """A line for each check, with its two figures; below one that FAILS, what to run again."""
    lines = []
    for check in table:
        two = f"{round(check.left, 3):.10g} {check.sign} {round(check.right, 3):.10g}"
        lines.append(f"{'FAILS' if check.failed else 'ok':6} {check.text:51} {two}")
        if check.failed:
            again = f"run {SCRIPTS[check.file]} again"
            where = f"in run {', '.join(check.failed)} (VOICE_LLM_OUT=…/{check.failed[0]}): "
            lines.append(f"       {where * several}{again}")
    return lines


def failure(failed):
    """What to say of the checks that FAIL; "" if none does."""
    causes = "; ".join(dict.fromkeys(cause for check in failed for cause in check.causes))
    scripts = " and ".join(dict.fromkeys(SCRIPTS[check.file] for check in failed))
    what = "1 check FAILS" if len(failed) == 1 else f"{len(failed)} checks FAIL"
    idle = f"run {scripts} again on an idle machine, then report.py"
    then = f"{causes}. Then run {scripts} again, and report.py" if causes else idle
    return f"{what}: {then}" if failed else ""


# ---- what it prints
BLOCKS = " ▏▎▍▌▋▊▉█"
SERVER = ("model", "context", "slots", "build")
ASKED = ("prompt", 0, sse.SYSTEM), ("question", 1, sse.QUESTION)  # and the lab's own


def sent(runs, number):
    """A message of step 2 → its different texts, usually one, and their lengths as text."""
    texts = list(dict.fromkeys(known(runs, f"request.messages.{number}.content")))
    return texts, "/".join(str(len(text)) for text in texts)


def about(runs, lab=""):
    """Who answered, in how many runs, to what prompt: `lab` where it is the lab's."""
    names = [" / ".join(dict.fromkeys(known(runs, f"server.{key}"))) for key in SERVER]
    names[0] = names[0] or "a model not named in props.json"
    names += [f"{len(runs)} runs"] * (len(runs) > 1)
    asked = [(name, *sent(runs, number), [its]) for name, number, its in ASKED]
    own = [f"own {name} of {n} characters" for name, has, n, its in asked if has not in ([], its)]
    return ", ".join(filter(None, [*names, *(own or [lab * bool(asked[0][1])])]))


def written(runs):
    """From when to when the files were written."""
    times = sorted(time.localtime(at) for run in runs for at in run.times)
    first, last = (time.strftime("%Y-%m-%d %H:%M", at) for at in (times[0], times[-1]))
    return f"written {first} to {last[11:] if last[:10] == first[:10] else last}"


def same(old, new):
    """Whether both sides have one server, one prompt and one question → lines."""
    both, lines = old + new, []
    other = [key for key in SERVER if len({run.figures.get(f"server.{key}") for run in both}) > 1]
    if not all("props" in run.figures for run in both):
        lines.append(f"can't tell whether {', '.join(SERVER)} are the same: props.json is missing")
    elif other:
        lines.append(f"NOT THE SAME: {', '.join(other)}. The changes are not the prompt's alone.")
    for name, number, _ in ASKED:
        (was, length), (now, its_length) = sent(old, number), sent(new, number)
        if not was or not now:
            lines.append(f"can't tell whether the {name} is the same: request.json is missing")
        elif was == now:
            lines.append(f"{name} the same: {length} characters")
        else:
            lines.append(f"{name} not the same: {length} and {its_length} characters")
    return lines


def worth(old, new):
    """What a difference between the two sides is worth → lines."""
    n, m = len(old), len(new)
    lines = ["One run on a side tells nothing about noise: ./run_all.sh --compare does."]
    if min(n, m) > 1:
        many = f"{n} and {m} runs of the same prompt"
        often = f"1 in {math.comb(n + m, n) / 2:,.10g} times"
        lines = [f"~ where the ranges overlap; by chance alone those of {many} lie apart {often}."]
    first, second = ([at for run in runs for at in run.times] for runs in (old, new))
    if max(first) < min(second) or max(second) < min(first):
        lines.append("One side came first: a machine that got slower or faster is not excluded.")
    return lines


def change(old, new):
    """The change of a row's values: "=", "~" where their ranges overlap, or in percent."""
    if min(old) <= max(new) and min(new) <= max(old):
        return "=" if len({*old, *new}) == 1 else "~"
    was, now = statistics.median(old), statistics.median(new)
    return f"{round(now / was - 1, 3) + 0.0:+.1%}" if was else "from 0"  # 0.0: never -0.0


def comparison(old, new):
    """Two sides → [(name, old, new, change, mark), …] as text, report.json's rows first."""
    cells, tables = [("", "old", "new", "change", "")], [figures(old), figures(new)]
    for row in sorted(ROWS, key=lambda row: not row.report):
        sides = [table.get(row.name) for table in tables]
        texts = [f"{of.median:{FORMATS[row.unit]}}" if of else "not measured" for of in sides]
        changed = change(sides[0].values, sides[1].values) if all(sides) else ""
        mark = "" if all(of.steady for of in sides if of) else "UNSTEADY"
        if all(sides) and [len(of.values) for of in sides] != [len(old), len(new)]:
            mark = f"of {len(sides[0].values)} and {len(sides[1].values)}"
        if any(sides):
            cells.append((row.name, *texts, changed, mark))
    return cells


def picture(times, width, unicode):
    """The figures `times` as lines of at most `width` columns: name, ms, bar, words."""
    lines, names = [], max(len(of.row.name) for of in times)
    bars = max(6, min(24, width - names - 52))
    scale = bars / max(*(of.median for of in times), 0.001)
    for row, _, ms, words, _ in times:
        eighths = max(1, round(ms * scale * 8))
        bar = BLOCKS[-1] * (eighths // 8) + BLOCKS[eighths % 8].strip()
        bar = bar if unicode else "#" * max(1, round(ms * scale))
        line = f"{row.name:{names}} {ms:8.1f} ms {bar:{bars}}"
        for phrase in words.replace(", ", ",\n").split("\n"):
            if len(line) + 1 + len(phrase) > width:
                lines.append(line)
                line = " " * (names + 13 + bars)
            line += f" {phrase}"
        lines.append(line)
    return lines


def markdown(title, cells):
    """One table that GitHub draws, the first of `cells` its head, under one line."""
    rows = [cells[0], (":--", *["--:"] * (len(cells[0]) - 2), ":--"), *cells[1:]]
    title = re.sub(r"([\\|`*_<\[])", r"\\\1", title)
    return [title, "", *(f"| {' | '.join(row)} |" for row in rows), ""]


def report(options, old, new, width, unicode):
    """The picture of `new`, or what became of `old` → lines."""
    times = [of for of in figures(new).values() if of.row.unit == "ms"]
    titles = [about(runs, "the lab's prompt") for runs in (old, new) if runs]
    if old:
        cells, facts, notes = comparison(old, new), same(old, new), worth(old, new)
        if options.markdown:
            title = titles[0] if titles[0] == titles[1] else "old: {}; new: {}".format(*titles)
            return [*markdown(title, cells), *facts, *notes]
        head = [f"old: {options.against}: {about(old)}, {written(old)}"]
        head.append(f"new: {sse.setting('VOICE_LLM_OUT')}: {about(new)}, {written(new)}")
        table = [f"{row[0]:32} {row[1]:>12} {row[2]:>12} {row[3]:>9}  {row[4]}" for row in cells]
        return [*head, *facts, *table, "", *notes]
    hints = ["Rows that are marked vary too much: measure again on an idle machine."]
    hints *= not all(of.steady for of in times)
    if options.markdown:
        cells = [("", "ms", ""), *((of.row.name, f"{of.median:.1f}", of.words) for of in times)]
        return [*markdown(*titles, cells), *hints]
    head = f"Where the time goes: {about(new)}"
    return [head, *picture(times, width, unicode), *hints, "", written(new)]


def arguments():
    options = sse.parser(__doc__)
    options.add_argument("--checks", action="store_true", help="list all checks, not just FAILS")
    options.add_argument("--against", metavar="DIR", help="compare with the earlier results in DIR")
    options.add_argument("--markdown", action="store_true", help="print one table, for GitHub")
    options.add_argument("--without", metavar="NAME,...", help="as if NAME.json were missing")
    found = options.parse_args()
    found.without = re.findall("[^,]+", found.without or "")
    if {*found.without} - {*SCRIPTS}:
        options.error(f"--without takes these, with commas between: {', '.join(SCRIPTS)}")
    return found


def main():
    options, folder = arguments(), sse.setting("VOICE_LLM_OUT")
    if (against := options.against) is not None and not os.path.isdir(against):
        raise sse.Failure(f"there is no folder {against!r} to compare with")
    if against and os.path.realpath(against) == os.path.realpath(folder):
        raise sse.Failure("--against names the folder of VOICE_LLM_OUT itself: give it another")
    new, old = load(folder, options.without), load(against) if against else []
    wrong = [missing(folder, new, "VOICE_LLM_OUT"), missing(against or "", old, "--against")]
    for runs, text in (new, wrong[0]), (old, wrong[1]):
        if runs and not runs[0].times:
            raise sse.Failure(text)
    if not wrong[0]:
        ours = {of.row.report: of.median for of in figures(new).values() if of.row.report}
        sse.save({sse.result_path("report.json"): ours})
    table = checks(new)
    failed = [check for check in table if check.failed]

    width = max(80, shutil.get_terminal_size().columns)
    encoding = (sys.stdout and sys.stdout.encoding) or "ascii"
    unicode = BLOCKS.encode(encoding, "replace").decode(encoding) == BLOCKS
    lines = report(options, old, new, width, unicode)
    lines.append(f"{len(table) - len(failed)} of {len(table)} checks hold")
    lines += check_lines(table if options.checks else failed, len(new) > 1)
    if not wrong[0] and not options.markdown:
        lines.append(f"wrote {sse.result_path('report.json')}")
    fold = textwrap.TextWrapper(width, subsequent_indent="  ", break_on_hyphens=False).fill
    for line in map(sse.printable, lines):
        print(line if options.markdown else fold(line), flush=True)
    wrong.append(failure(failed))
    if any(wrong):
        raise sse.Failure(". ".join(filter(None, wrong)))


if __name__ == "__main__":
    sse.run(main)
