#!/usr/bin/env python3
"""Step 8: the key figures in one file, and a picture of where the time goes.

Reads what the five measurements wrote, asks no server, and writes report.json:

  ttft_p50_ms, total_p50_ms        from ttft.json
  ttft_12docs_ms, prompt_n_12docs  from the last of prefill.json
  cache_ttft_ms                    from cache.json, second
  first_sentence_ms                from sentence.json
  cancel_idle_ms                   from cancel.json, slot_idle_after_ms

Then it prints every time with a bar on one scale, and how many checks hold:
what must be so within one run. A check that FAILS is listed with its two
figures, and makes the exit status 1. UNSTEADY marks times that vary too much.
"""

import json
import os
import shutil
import sys
import textwrap
from collections import namedtuple

import sse
from measure_cache import NEARLY_ALL
from measure_cancel import CUT
from measure_prefill import COUNTS
from measure_ttft import RUNS, median

NUMBER = float  # in a shape: a number from 0 up
BLOCKS = " ▏▎▍▌▋▊▉█"
FORMATS = {"ms": ".1f", "tokens": ".0f", "ms per token": ".2f"}  # of each unit


def numbers(*keys):
    return dict.fromkeys(keys, NUMBER)


REQUEST = numbers("prompt_n", "ttft_ms")
SHAPES = {  # what each file must hold; one with "?", file or key, may be missing
    "ttft.json": {
        "runs": [numbers("ttft_ms", "total_ms", "tokens")] * RUNS,
        **numbers("ttft_p50", "total_p50"),
    },
    "prefill.json": [numbers("docs", "prompt_n", "prompt_ms", "ttft_ms")] * len(COUNTS),
    "cache.json": {
        "first": REQUEST,
        "second": REQUEST,
        "changed_suffix?": REQUEST,
        "changed_prefix": REQUEST,
    },
    "sentence.json": {
        **numbers("ttft_ms", "first_sentence_ms", "total_ms"),
        "first_sentence": str,
        "text": str,
    },
    "cancel.json": numbers("max_tokens", "received_tokens", "closed_at_ms", "slot_idle_after_ms"),
    "cancel_prefill.json?": numbers("docs", "closed_at_ms", "next_ttft_ms", "next_prompt_ms"),
    "props.json?": {},
}

# One figure: what it is called, its value, "ms", "tokens" or "ms per token", words that explain it, whether it can
# be relied on, and its key in report.json, if it has one.
Row = namedtuple("Row", "name value unit words steady key", defaults=("", True, ""))

# What must hold within one run: the step it is about, a sentence, `left sign right`, and what a failure comes from,
# where the figures tell.
Check = namedtuple("Check", "step text left sign right cause", defaults=("",))


# ---------------------------------------------------------------------------- the files
def script_of(name):
    """The script that writes the file `name`."""
    others = {
        "cancel_prefill.json": "measure_cancel.py --during-prefill",
        "props.json": "sse.py --server",
    }
    return others.get(name) or f"measure_{name[:-5]}.py"


def load(folder, setting):
    """The results in `folder` → {"ttft": content of ttft.json, …}; optional files only where this run wrote them.

    `setting`: what names the folder. Raises sse.Failure naming every missing file and its script, or the file and the
    key that is not what it must be.
    """
    missing = [
        name
        for name in SHAPES
        if not name.endswith("?") and not os.path.exists(os.path.join(folder, name))
    ]
    if missing:
        fake = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake-results")
        what = (
            f"missing in {folder}"
            if os.path.isdir(folder)
            else f"there is no folder {folder} with results"
        )
        names = ", ".join(f"{name} ({script_of(name)} makes it)" for name in missing)
        other = f"; the simulated ones are in {fake}" if os.path.isdir(fake) else ""
        raise sse.Failure(
            f"{what}: {names}: run these, or set {setting} to the folder of the results{other}"
        )
    results, times = {}, {name: time for time, name in written(folder)}
    required = min(times[name] for name in SHAPES if not name.endswith("?"))
    if times.get("cancel_prefill.json", required) < required - 1:
        del times["cancel_prefill.json"]  # of an earlier run: this one has not measured it
    for name, shape in SHAPES.items():
        path, again = (
            os.path.join(folder, name.rstrip("?")),
            f"run {script_of(name.rstrip('?'))} again",
        )
        if name.rstrip("?") not in times:
            continue
        try:
            with open(path, encoding="utf-8-sig") as file:
                content = json.load(file)
        except OSError as error:
            raise sse.Failure(f"can't read {path} ({error.strerror}): make it readable") from None
        except (ValueError, RecursionError):
            raise sse.Failure(f"{path} is not JSON: {again}") from None
        wrong = mismatch(content, shape)
        if wrong:
            raise sse.Failure(f"{path}: {wrong}: {again}")
        results[os.path.basename(path)[:-5]] = content
    docs = [row["docs"] for row in results["prefill"]]
    if docs != list(COUNTS):
        raise sse.Failure(
            f"{folder}/prefill.json: docs is {docs}, not {list(COUNTS)}: run measure_prefill.py again"
        )
    return results


def mismatch(value, shape, where=""):
    """What of `value` is not as `shape` says, "" where all is. `where`: the keys that lead to it."""
    inner = []
    if shape in (NUMBER, str):
        number = shape is NUMBER
        ok, kind = (
            (sse.is_number(value), "a number from 0 up")
            if number
            else (isinstance(value, str), "a text")
        )
    elif isinstance(shape, list):
        ok, kind = isinstance(value, list) and len(value) == len(shape), f"a list of {len(shape)}"
        inner = (
            [(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value)]
            if ok
            else []
        )
    else:
        ok, kind = isinstance(value, dict), "an object"
        keys = (
            [key.rstrip("?") for key in shape if not key.endswith("?") or key[:-1] in value]
            if ok
            else []
        )
        inner = [
            (value.get(key), shape.get(key) or shape[f"{key}?"], f"{where} {key}".strip())
            for key in keys
        ]
    if not ok:
        what = "is missing or null" if value is None else f"is {value!r:.40}, not {kind}"
        return f"{where} {what}".strip()
    return next(filter(None, (mismatch(*item) for item in inner)), "")


def written(folder):
    """When each result in `folder` was written → [(time, name), …], the oldest first."""
    paths = [os.path.join(folder, name.rstrip("?")) for name in SHAPES]
    return sorted(
        (os.path.getmtime(path), os.path.basename(path)) for path in paths if os.path.exists(path)
    )


def written_apart(folder):
    """A line that asks whether the files are of one run, if a run would have written them in another way; "" if not."""
    times = {name: time for time, name in written(folder)}
    (oldest, old), *_, (newest, new) = written(folder)
    if newest - oldest >= 600:
        return (
            f"{old} is {(newest - oldest) / 60:.0f} minutes older than {new}: are they of one run?"
        )
    order = [name for name in SHAPES if not name.endswith("?")]
    for early, late in zip(order, order[1:]):
        if times[late] < times[early] - 1:
            return f"{late} is older than {early}: are they of one run?"
    return ""


# ---------------------------------------------------------------------------- the figures
def rows(results):
    """Every figure → [Row, …], in the order in which they are shown."""
    ttft, prefill, cache = results["ttft"], results["prefill"], results["cache"]
    sentence, cancel, early = results["sentence"], results["cancel"], results.get("cancel_prefill")
    table = []

    for name, key in ("first token", "ttft"), ("whole answer", "total"):
        times = sorted(run[f"{key}_ms"] for run in ttft["runs"])
        words = f"p50 of {RUNS}, {times[0]:.1f} to {times[-1]:.1f}"
        table.append(
            Row(name, ttft[f"{key}_p50"], "ms", words, times[-1] <= 2 * times[0], f"{key}_p50_ms")
        )

    # Cold prompts of one run should cost the same for each token; each was measured only once.
    cold = {
        f"{COUNTS[-1]} docs": prefill[-1],
        "cache, first": cache["first"],
        "cache, clock first": cache["changed_prefix"],
    }
    ms_per_token = {name: row["ttft_ms"] / max(row["prompt_n"], 1) for name, row in cold.items()}
    steady = max(ms_per_token.values()) <= 1.5 * min(ms_per_token.values())

    for row in prefill:
        name, last = f"{row['docs']} docs", row is prefill[-1]
        prefill_ms, share = (
            row["prompt_ms"] / max(row["prompt_n"], 1),
            row["prompt_ms"] / max(row["ttft_ms"], 0.001),
        )
        words = f"{row['prompt_n']} tokens at {prefill_ms:.2f} ms, prefill {share:.0%}"
        key = "ttft_12docs_ms" if last else ""
        table.append(
            Row(f"first token, {name}", row["ttft_ms"], "ms", words, steady or not last, key)
        )
        table.append(
            Row(f"tokens, {name}", row["prompt_n"], "tokens", key="prompt_n_12docs" if last else "")
        )

    for name, key in (
        ("cache, first", "first"),
        ("cache, same again", "second"),
        ("cache, clock last", "changed_suffix"),
        ("cache, clock first", "changed_prefix"),
    ):
        if key in cache:
            words = f"{sse.plural(cache[key]['prompt_n'], 'token')} computed"
            words += f" (first: {cache['first']['prompt_n']})" if key != "first" else ""
            report_key = "cache_ttft_ms" if key == "second" else ""
            table.append(
                Row(
                    name, cache[key]["ttft_ms"], "ms", words, steady or name not in cold, report_key
                )
            )
            table.append(Row(f"tokens, {name}", cache[key]["prompt_n"], "tokens"))

    after = sentence["first_sentence_ms"] - sentence["ttft_ms"]
    words = f"speech starts; {after:.1f} after first token"
    table.append(
        Row("first sentence", sentence["first_sentence_ms"], "ms", words, key="first_sentence_ms")
    )
    words = f"closed at {cancel['closed_at_ms']:.1f}, {sse.plural(cancel['received_tokens'], 'fragment')} received"
    table.append(
        Row("stop after hang-up", cancel["slot_idle_after_ms"], "ms", words, key="cancel_idle_ms")
    )
    if early:
        words = f"hang-up in prefill; its own: {early['next_prompt_ms']:.1f}"
        longest = (
            cache["first"]["ttft_ms"] + early["next_prompt_ms"]
        )  # the whole prompt, and then its own
        table.append(
            Row(
                "next caller waits",
                early["next_ttft_ms"],
                "ms",
                words,
                early["next_ttft_ms"] <= 1.5 * longest,
            )
        )
    return table + [
        Row(f"ms per token, {name}", ms, "ms per token", "", steady)
        for name, ms in ms_per_token.items()
    ]


def figures(table):
    """The content of report.json."""
    return {row.key: row.value for row in table if row.key}


def bar(length, unicode):
    """A bar `length` characters long, a float; never empty. In eighths of a block, or whole # marks."""
    if not unicode:
        return "#" * max(1, round(length))
    eighths = max(1, round(length * 8))
    return BLOCKS[-1] * (eighths // 8) + BLOCKS[eighths % 8].strip()


def picture(table, width, unicode):
    """The times of `table` as aligned lines of at most `width` columns: name, ms, bar, words (below, if narrow)."""
    times = [row for row in table if row.unit == "ms"]
    name_width = max(len(row.name) for row in times)
    bar_width = max(4, min(24, width - name_width - 52))
    left = name_width + 14 + bar_width
    beside = width - left >= 24
    scale = bar_width / max(max(row.value for row in times), 0.001)
    lines = []
    for row in times:
        start = f"{row.name:{name_width}} {row.value:8.1f} ms {bar(row.value * scale, unicode)}"
        words = row.words if row.steady else f"{row.words}, UNSTEADY"
        wrapped = textwrap.wrap(words, width - left if beside else width - 2)
        if beside:
            lines += [
                f"{text:{left}}{line}" for text, line in zip([start, *[""] * len(wrapped)], wrapped)
            ]
        else:
            lines += [start, *(f"  {line}" for line in wrapped)]
    if not all(row.steady for row in times):
        lines += textwrap.wrap(
            "Rows that are marked vary too much: measure again on an idle machine.", width
        )
    return lines


# ---------------------------------------------------------------------------- what must hold
def checks(results):
    """What must hold within one run → [Check, …]."""
    runs, prefill, cache = results["ttft"]["runs"], results["prefill"], results["cache"]
    sentence, cancel = results["sentence"], results["cancel"]
    closest = min(runs, key=lambda run: run["total_ms"] - run["ttft_ms"])
    text = "the first token comes before the end, in every run"
    table = [Check("ttft", text, closest["ttft_ms"], "<", closest["total_ms"])]
    for key in "ttft", "total":
        third, text = (
            median([run[f"{key}_ms"] for run in runs]),
            f"{key}_p50 is the third of the five sorted runs",
        )
        table.append(Check("ttft", text, results["ttft"][f"{key}_p50"], "==", third))

    none, four, twelve = prefill
    no_tokens = "the documents add no tokens: look into VOICE_LLM_KB"
    table += [
        Check(
            "prefill",
            "4 documents are more tokens than none",
            none["prompt_n"],
            "<",
            four["prompt_n"],
            no_tokens,
        ),
        Check(
            "prefill",
            "12 documents are more tokens than 4",
            four["prompt_n"],
            "<",
            twelve["prompt_n"],
            no_tokens,
        ),
        Check(
            "prefill", "4 documents delay the first token", none["ttft_ms"], "<", four["ttft_ms"]
        ),
        Check("prefill", "12 documents delay it more", four["ttft_ms"], "<", twelve["ttft_ms"]),
    ]
    for name, row in zip(("no documents", "4 documents", "12 documents"), prefill):
        text = f"{name}: prefill is over at the first token"
        table.append(Check("prefill", text, row["prompt_ms"], "<=", row["ttft_ms"]))

    first, second, prefix = cache["first"], cache["second"], cache["changed_prefix"]
    most = NEARLY_ALL * first["prompt_n"]
    no_hit = warm = ""
    if second["prompt_n"] >= most:
        no_hit = "second reused nothing: the model (sliding window, recurrent memory: --swa-full helps some) or "
        no_hit += "a flag of llama-server (--no-cache-prompt)"
    if prefix["prompt_n"] < most:
        warm = "a cache kept the prompt: start llama-server with --cache-ram 0 and -np 1"
    table += [
        Check(
            "cache",
            "a hit computes fewer tokens than first",
            second["prompt_n"],
            "<",
            first["prompt_n"],
            no_hit,
        ),
        Check(
            "cache", "a hit is faster than first", second["ttft_ms"], "<", first["ttft_ms"], no_hit
        ),
        Check(
            "cache",
            f"changed prefix: {NEARLY_ALL} of first is computed again",
            most,
            "<=",
            prefix["prompt_n"],
            warm,
        ),
        Check(
            "cache",
            "changed prefix: slower than a hit",
            second["ttft_ms"],
            "<",
            prefix["ttft_ms"],
            no_hit or warm,
        ),
    ]

    length = len(sentence["first_sentence"])
    begins = length if sentence["text"].startswith(sentence["first_sentence"]) else 0
    table += [
        Check(
            "sentence",
            "first token, then first sentence",
            sentence["ttft_ms"],
            "<=",
            sentence["first_sentence_ms"],
        ),
        Check(
            "sentence",
            "first sentence, then the end",
            sentence["first_sentence_ms"],
            "<=",
            sentence["total_ms"],
        ),
        Check("sentence", "the text starts with the sentence (characters)", begins, "==", length),
    ]

    received, closed_ms = cancel["received_tokens"], cancel["closed_at_ms"]
    # Half of the time that the rest of the answer would have taken:
    half_ms = 0.5 * (cancel["max_tokens"] - received) * closed_ms / max(received, 1)
    went_on = ""
    if half_ms > 0:
        went_on = (
            "the server may have gone on to the end, as behind a relay that swallows a hang-up: "
        )
        went_on += "set VOICE_LLM_URL to llama-server itself"
    idle_ms = cancel["slot_idle_after_ms"]
    return table + [
        Check("cancel", "fragments came before the close", 0, "<", received),
        Check(
            "cancel", "the close came before the last token", received, "<", cancel["max_tokens"]
        ),
        Check("cancel", "closed at 500 ms or later", CUT * 1000, "<=", closed_ms),
        Check(
            "cancel",
            "the slot was idle before half of the rest was due",
            idle_ms,
            "<",
            half_ms,
            went_on,
        ),
    ]


def holds(check):
    """Whether `left sign right`."""
    left, right = check.left, check.right
    return {"<": left < right, "<=": left <= right, "==": left == right}[check.sign]


def check_lines(table, width):
    """A line for each check: ok or FAILS, the sentence, its two figures. Below a FAILS, the step to run again."""
    lines = []
    for check in table:
        two = f"{round(check.left, 3):.10g} {check.sign} {round(check.right, 3):.10g}"
        line = (
            f"{'ok' if holds(check) else 'FAILS':6} {check.text:{51 if width >= 80 else 1}} {two}"
        )
        lines += textwrap.wrap(line, width, subsequent_indent=" " * 7)
        lines += [] if holds(check) else [f"       run measure_{check.step}.py again"]
    return lines


# ---------------------------------------------------------------------------- two runs
def comparison(old, new, width):
    """The rows of two runs as lines of at most `width` columns: old, new, change in percent; report.json's first."""
    both = {}
    for side, results in enumerate((old, new)):
        for row in rows(results):
            both.setdefault(row.name, [None, None])[side] = row
    wide = width >= 78
    lines = [f"{'':32} {'old':>12} {'new':>12}    change" if wide else "old, new, change"]
    for name, (was, now) in sorted(
        both.items(), key=lambda item: not any(row and row.key for row in item[1])
    ):
        left, right = (
            "not measured" if row is None else f"{row.value:{FORMATS[row.unit]}}"
            for row in (was, now)
        )
        change = ""
        if was and now:  # adding 0.0 turns -0.0 into 0.0
            change = f"{round(now.value / was.value - 1, 3) + 0.0:+.1%}" if was.value else "from 0"
        mark = "" if all(row is None or row.steady for row in (was, now)) else "UNSTEADY"
        if wide:
            lines.append(f"{name:32} {left:>12} {right:>12} {change:>9}  {mark}".rstrip())
        else:
            lines += [name, "  " + ", ".join(filter(None, (left, right, change, mark)))]
    return lines


def main():
    options = sse.parser(__doc__)
    options.add_argument(
        "--checks", action="store_true", help="list all checks, not only those that FAIL"
    )
    options.add_argument("--against", metavar="DIR", help="compare with the earlier results in DIR")
    options = options.parse_args()
    if options.against is not None and not os.path.isdir(options.against):
        raise sse.Failure(f"there is no folder {options.against!r} to compare with")
    results = load(sse.setting("VOICE_LLM_OUT"), "VOICE_LLM_OUT")
    if options.against and os.path.samefile(options.against, sse.result_path()):
        raise sse.Failure(
            "--against names the folder of VOICE_LLM_OUT itself: give it the earlier results"
        )
    old = load(options.against, "--against") if options.against else None
    table = rows(results)
    sse.save({sse.result_path("report.json"): figures(table)})

    width = max(40, shutil.get_terminal_size().columns)
    encoding = (sys.stdout and sys.stdout.encoding) or "ascii"
    unicode = BLOCKS.encode(encoding, "replace").decode(encoding) == BLOCKS
    lines = []

    def add(text, most=None):
        lines.extend(
            textwrap.wrap(
                sse.printable(text), width, max_lines=most, placeholder=" …", break_on_hyphens=False
            )
        )

    if old:
        was, now = (sse.identity(r.get("props", {})) for r in (old, results))
        add(f"old: {options.against}: {', '.join(was.values())}")
        add(f"new: {sse.setting('VOICE_LLM_OUT')}: {', '.join(now.values())}")
        different = [
            key for key in ("model", "context", "slots", "build") if was.get(key) != now.get(key)
        ]
        if not (old.get("props") and results.get("props")):
            add(
                "props.json is missing: nobody knows whether model, context, slots and build are the same"
            )
        elif different:
            add(f"NOT THE SAME: {', '.join(different)}. The changes are not the prompt's alone.")
        lines += comparison(old, results, width)
    else:
        add(f"Where the time goes: {', '.join(sse.identity(results.get('props', {})).values())}", 2)
        lines += picture(table, width, unicode)
    lines.append("")
    add(written_apart(sse.result_path()))
    must_hold = checks(results)
    failed = [check for check in must_hold if not holds(check)]
    add(f"{len(must_hold) - len(failed)} of {len(must_hold)} checks hold")
    lines += check_lines(must_hold if options.checks else failed, width)
    add(f"wrote {sse.result_path('report.json')}")
    print("\n".join(lines), flush=True)
    if failed:
        causes = "; ".join(dict.fromkeys(check.cause for check in failed if check.cause))
        scripts = " and ".join(dict.fromkeys(f"measure_{check.step}.py" for check in failed))
        what = f"{len(failed)} checks FAIL" if len(failed) > 1 else "1 check FAILS"
        if causes:
            raise sse.Failure(f"{what}: {causes}. Then run {scripts} again, and report.py")
        raise sse.Failure(f"{what}: run {scripts} again on an idle machine, then report.py")


if __name__ == "__main__":
    sse.run(main)
