#!/usr/bin/env bash
# All eight steps, one after the other: ./run_all.sh on the Pod or beside a llama-server of your
# own, ./run_all.sh --fake on any machine. Needs bash (3.2 will do) and python3 (3.9).
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # sh may be dash,
set +o posix -u                                  # or a bash that plays sh
unset CDPATH PYTHONSAFEPATH # which keeps a script from finding sse.py

usage="usage: run_all.sh [--fake] [--more] [--repeat N] [--compare OLD NEW]

Runs all eight steps; results go into VOICE_LLM_OUT (default: /root/voice/llm).
  --fake     against the suite's own fake server (simulated times), into
             fake-results/ beside this script unless VOICE_LLM_OUT is set
  --more     also what a line at the end of the prompt costs, a call of six
             turns, and what the next caller waits after a hang-up in prefill
  --repeat   N times, into VOICE_LLM_OUT/1, 2 and so on, and their medians
  --compare  two files as the system prompt, in turn, N times each (5 unless
             --repeat says so), into VOICE_LLM_OUT/old/1, new/1 and so on
Each step can be run alone; 'python3 sse.py --help' shows the settings."
blank() { case $1 in *[![:space:]]*) return 1 ;; esac }
wrong() { printf 'run_all.sh: %s\n%s\n' "$1" "$usage" >&2; exit 2; }
fake='' more='' repeat='' old='' new=''
while [ "$#" -gt 0 ]; do
  case $1 in
    --fake) fake=yes ;;
    --more) more=yes ;;
    --repeat) repeat=${2:-0}; shift ;;
    --compare) old=${2:- } new=${3:- }; shift; shift ;;
    -h | --help) echo "$usage"; exit 0 ;;
    *) wrong "unknown option '$1'" ;;
  esac
  shift
done
case $repeat in 0* | *[!0-9]* | ?????*) wrong "--repeat needs a number from 1" ;; esac
if [ -n "$old" ] && { blank "$old" || blank "$new"; }; then wrong "--compare needs two files"; fi

here=$(readlink -f "${BASH_SOURCE[0]}")
here=${here%/*} out=${VOICE_LLM_OUT-} default=/root/voice/llm
if [ -n "$fake" ]; then
  unset VOICE_LLM_API_KEY VOICE_LLM_URL # of a real server
  default=$here/fake-results
  if [ "${VOICE_LLM_KB-}" != none ]; then export VOICE_LLM_KB=$here/tests/kb; fi
fi
if blank "${VOICE_LLM_URL-}"; then VOICE_LLM_URL=http://127.0.0.1:8080; fi
if blank "$out"; then out=$default; fi
export VOICE_LLM_URL VOICE_LLM_OUT=$out VOICE_LLM_SYSTEM=${VOICE_LLM_SYSTEM-} VOICE_LLM_RUN_ALL=yes
scratch=$(mktemp "${TMPDIR:-/tmp}/voice-llm.XXXXXX") || exit 1
exec 3>"$scratch"; exec 4<"$scratch" # what is written to 3 is read from 4
rm -f -- "$scratch"
# Commands run in the background, under wait_for, so that a signal reaches this script at once. No
# trap on EXIT: a job that is told to end before it has become its command would run it, too.
server='' starts='' number='' run='' finished='' failed=''
: &
waited=$! # the newest of the jobs that have ended
wait_for() {
  "$@" &
  wait "$!"
  set -- "$?"
  waited=$!
  return "$1"
}
end() { # the exit status, and after a signal which step it was
  trap '' INT TERM # a second signal, as timeout sends, must not break into this
  local job kept="the files of later steps are as they were"
  if [ -n "${2-}" ]; then printf '\nrun_all.sh: stopped in step %s; %s\n' "$2" "$kept" >&2; fi
  for job in "$!" $server; do # more than once, since such a job can also miss the signal
    while [ "$job" != "$waited" ] && kill "$job" 2>/dev/null; do sleep 0.1; done
  done
  if [ -n "$finished" ]; then echo "run_all.sh: to see what is finished: $finished" >&2; fi
  exit "$1"
}
stop() { echo "run_all.sh: $1" >&2; end 1; }
trap 'end 130 "$number$run"' INT
trap 'end 143 "$number$run"' TERM

wait_for python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null ||
  stop "needs python3, version 3.9 or later, on PATH"
if [ -n "$repeat" ]; then set -- "$out/1" "$out"/*.json*; fi
if [ -n "$old" ]; then set -- "$out/old" "$out/new"; fi
for path; do [ ! -e "$path" ] || stop "$path is there already: set another VOICE_LLM_OUT"; done
up='import sys; sys.path[0] = sys.argv[1]
import sse
began, now = (float(text.replace(",", ".")) for text in sys.argv[2:]) # a comma in some locales
sys.exit(now - began >= sse.timeout() or sse.get("/health", 5) is None)'
if [ -z "$fake" ] && ! VOICE_LLM_TIMEOUT=2 wait_for python3 -c "$up" "$here" 0 0 2>/dev/null; then
  if command -v voice-llm >/dev/null; then starts=voice-llm; else starts=you; fi
fi
two_ways() {
  case $starts,$VOICE_LLM_URL in *@*) return ;; you,http://*) ;; *) return ;; esac
  echo "run_all.sh: no command voice-llm on PATH, and no server at $VOICE_LLM_URL. Two ways on:
  start one:  llama-server -m MODEL.gguf --host 127.0.0.1 --port 8080 -c 4096 -np 1 --cache-ram 0
              (one elsewhere: set VOICE_LLM_URL; no documents: VOICE_LLM_KB=$here/tests/kb)
  or simulate: $here/run_all.sh --fake" >&2
}
for VOICE_LLM_SYSTEM in "${old:-$VOICE_LLM_SYSTEM}" ${new:+"$new"}; do
  wait_for python3 "$here/measure_prefill.py" --check || { two_ways; stop "nothing was measured"; }
done
if [ -z "$old" ] && ! blank "$VOICE_LLM_SYSTEM"; then echo "system prompt: $VOICE_LLM_SYSTEM"; fi
if [ -n "$fake" ]; then
  echo "SIMULATED: a fake server without a model; its times say nothing about a real one."
  echo "Results go to $out."
  python3 "$here/tests/fake_server.py" --port 0 --end-with-parent >&3 &
  server=$!
  until read -r VOICE_LLM_URL <&4; do
    kill -0 "$server" 2>/dev/null || stop "the fake server did not start"
    wait_for sleep 0.1
  done
fi

heading() { number=$1 what=$2; printf '\n[%s/8] %s\n' "$number" "$what"; }
attempt() { # a command of the step
  wait_for "$@" && return
  set -- "$?"
  case $1 in 130 | 143) end "$1" "$number$run" ;; esac # by a signal that reaches this script, too
  echo "run_all.sh: step $number ($what) failed with exit status $1" >&2
  failed=${failed:-$1}
  return 1
}
step() { # number, what it is, the name of its file, script and options
  local began=${EPOCHREALTIME:-$SECONDS} why="no answer from /health, or VOICE_LLM_TIMEOUT used up"
  if [ -z "$over" ]; then
    heading "$1" "$2"
    attempt python3 "$here/$4" "${@:5}" && return
    wait_for python3 -c "$up" "$here" "$began" "${EPOCHREALTIME:-$SECONDS}" 2>/dev/null ||
      { over=yes; echo "run_all.sh: $why: the steps after it are left out" >&2; }
  fi
  without=$without,$3 missing="$missing, step $1 ($2): ${*:4}"
}
count_cancels() { # in the Pod's log; one that is followed for ever is left, or not read at all
  cancels=0
  wait_for timeout 2 voice-llm log >&3 2>/dev/null </dev/null
  while read -r line; do case $line in *"cancel task"*) cancels=$((cancels + 1)) ;; esac; done <&4
}
one_run() {
  over='' without='' missing=''
  heading 1 "the server"
  if [ "$starts" = voice-llm ]; then attempt voice-llm up || end "$failed"; fi
  attempt python3 "$here/sse.py" --server || { two_ways; end "$failed"; }
  step 2 "one answer, line by line" request sse.py
  step 3 "time to first token" ttft measure_ttft.py
  step 4 "prefill" prefill measure_prefill.py
  step 5 "KV cache" cache measure_cache.py ${more:+--changed-suffix}
  [ -z "$more" ] || step 5 "a call of six turns" call measure_cache.py --call
  step 6 "first sentence" sentence measure_sentence.py
  count_cancels; local before=$cancels
  step 7 "cancel" cancel measure_cancel.py
  count_cancels
  if [ "$cancels" -gt "$before" ]; then echo "voice-llm log has the server's 'cancel task'"; fi
  [ -z "$more" ] ||
    step 7 "hang-up during prefill" cancel_prefill measure_cancel.py --during-prefill
  heading 8 "report"
  attempt python3 "$here/report.py" ${without:+--without "${without#,}"}
  if [ -n "$missing" ]; then echo "run_all.sh: not measured: ${missing#, }" >&2; fi
}

if [ -z "$old$repeat" ]; then
  one_run
else
  total=$((${#old} ? 2 * ${repeat:-5} : repeat))
  for ((i = 1; i <= total; i++)); do
    case $old,$((i % 4)) in # old new, new old, old new, …
      ,*) folder=$i ;;
      *,[01]) folder=old/$(((i + 1) / 2)) VOICE_LLM_SYSTEM=$old ;;
      *) folder=new/$(((i + 1) / 2)) VOICE_LLM_SYSTEM=$new ;;
    esac
    number=1 run=" of run $i of $total${old:+ (${folder%/*}: $VOICE_LLM_SYSTEM)}"
    printf '\n== %s%s\n' "${run# of }" "${rest:+; about $((rest / 60)) min $((rest % 60)) s left}"
    VOICE_LLM_OUT=$out/$folder one_run
    rest=$((SECONDS * (total - i) / i))
    set -- "$out${old:+/old}"
    if [ -n "$old" ] && [ "$i" -gt 1 ]; then set -- "$out/new" --against "$out/old"; fi
    printf -v finished ' %q' python3 "$here/report.py" "${@:2}"
    printf -v finished 'VOICE_LLM_OUT=%q%s' "$1" "$finished"
  done
  run=''
  heading 8 "report of $total runs"
  VOICE_LLM_OUT=$1 attempt python3 "$here/report.py" "${@:2}"
  finished=''
fi
if [ -n "$fake" ]; then echo "SIMULATED: every time above and in these files is made up."; fi
end "${failed:-0}"
