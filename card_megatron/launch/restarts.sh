# ---------------------------------------------------------------- what becomes of the run
# Decisions rest on files, not on exit codes: checkpoints/step_N (only a complete one has such a name), stopped.json (the run
# was asked to end, has saved, and says why), refused.txt (starting it again would not help), finished (it got to its end:
# srun itself returns 0 also where a node could not even open a log).
restart=${SLURM_RESTART_COUNT:-0}  # SLURM does not set it the first time
# the number of an array's last task is that of the whole array too: only this form means the task alone
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
logs=$run_dir/logs/$SLURM_JOB_ID.$restart
history=$run_dir/restarts.jsonl
mkdir -p "$logs" || exit 1
export CARD_SUMMARY=$run_dir/logs/summary.log CARD_REFUSED=$logs/refused.txt CARD_FINISHED=$logs/finished

say() { printf '%s job %s.%s: %s\n' "$(date '+%F %T')" "$SLURM_JOB_ID" "$restart" "$*" | tee -a "$CARD_SUMMARY"; }

patiently() {  # a command of SLURM's, again for a minute where the controller does not answer
  local try
  for try in {1..10}; do "$@" && return; sleep 6; done
  return 1
}

job() { scontrol show job "$id" --oneliner; }

field() { grep -oE " $1=[^ ]*" | head -n 1 | cut -d= -f2; }  # of what job() printed

saved_step() {
  local newest
  newest=$(find "$run_dir/checkpoints" -maxdepth 1 -name 'step_*' 2>/dev/null | grep -oE '/step_[0-9]{6,}$' | sort -V | tail -n 1)
  echo $((10#0${newest#/step_}))
}

record() {  # RESTART REASON REQUEUED
  printf '{"time": %s, "job_id": %s, "restart": %s, "reason": "%s", "step": %s, "requeued": %s}\n' \
    "$(date +%s)" "$SLURM_JOB_ID" "$1" "$(tr -d '[:cntrl:]"\\' <<< "$2")" "$(saved_step)" "$3" >> "$history"
}

restarts_without_progress() {  # how many in a row began at the step that is still the newest
  local count=0 line
  while read -r line && [[ $line == *"\"step\": $(saved_step), \"requeued\": true}" ]]; do count=$((count + 1)); done \
    < <(tac "$history" 2>/dev/null)
  echo "$count"
}

rest_of_chain() {  # numbers of the jobs that wait behind this one: its name, and its comment too, which names the run
  local mine number comment
  read -r mine < <(patiently squeue --noheader --jobs="$SLURM_JOB_ID" --format=%k)
  patiently squeue --noheader --user="$SLURM_JOB_USER" --name="$SLURM_JOB_NAME" --states=PENDING --sort=i --format='%A %k' |
    while read -r number comment; do [[ $comment != "$mine" ]] || echo "$number"; done
}

end_chain() { [[ $chain == no ]] || rest_of_chain | xargs --no-run-if-empty scancel; }

give_up() {  # REASON
  record "$restart" "$1" false
  say "STOPPED, not requeued: $1"
  end_chain
  exit 1
}

stop_without_progress() {  # REASON
  give_up "$1; $max_restarts restarts in a row brought no checkpoint beyond step $(saved_step). Look at $run_dir/logs, then submit it again"
}

start_again() {  # REASON
  [[ $requeue == yes ]] || give_up "$1"
  (( $(restarts_without_progress) < max_restarts )) || stop_without_progress "$1"
  record "$restart" "$1" true
  say "requeued at step $(saved_step): $1"
  patiently scontrol requeue "$id" || give_up "SLURM refused to requeue it"
  exit 0
}

time_is_up() {  # the limit came before the save was done: KILL follows in SLURM's KillWait
  record "$restart" "time limit reached before the save was done: raise --signal" false
  say "TIME LIMIT reached before the save was done, at step $(saved_step): raise --signal, and submit it again"
  decided=yes
}

on_term() {
  trap '' TERM  # SLURM sends it to every process of the job: what is started from here on must outlive it
  say "TERM: SLURM ends this job"
  [[ $(job | field Reason) != TimeLimit ]] || time_is_up  # now: there may be no later
}

# A start that left no decision was ended by SLURM, which put the job back; its last word stands in the job's output.
if (( restart > 0 )) && ! grep -qs "\"job_id\": $SLURM_JOB_ID, \"restart\": $((restart - 1))," "$history"; then
  why=$(grep -ohE "JOB $SLURM_JOB_ID ON .* DUE TO [A-Z ]+" "$(patiently job | field StdOut)" 2>/dev/null | tail -n 1 | sed 's/.* DUE TO //; s/ *$//')
  record $((restart - 1)) "ended by SLURM: ${why:-no word, as when its first node is lost}" true
  (( $(restarts_without_progress) <= max_restarts )) || stop_without_progress "ended by SLURM: ${why:-no word}"
fi

# ---------------------------------------------------------------- the run
rm -f "$run_dir/stopped.json"
say "starts at step $(saved_step) on $SLURM_JOB_NODELIST, $CARD_WORLD_SIZE ranks; logs: $logs/rank_N.log"
ranks= decided=no
# The batch script alone gets USR1: srun passes it on to every rank. TERM reaches the ranks without our help.
trap 'say "USR1: time is nearly up; the ranks are asked to save"; [[ -z $ranks ]] || kill -USR1 "$ranks"' USR1
trap on_term TERM
@SRUN@ 2> "$logs/srun.log" &
ranks=$!
wait "$ranks"; code=$?
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; code=$?; done  # a signal ends wait, not srun
trap '' TERM USR1  # or the questions below could die of one that was meant for the ranks, and go unanswered

# ---------------------------------------------------------------- its end
reason=$(sed -nE 's/^ *"reason": "(.*)",?$/\1/p' "$run_dir/stopped.json" 2>/dev/null)
if [[ -s $CARD_REFUSED ]]; then
  give_up "refused: $(tr '\n' ' ' < "$CARD_REFUSED")"
elif [[ -e $CARD_FINISHED ]]; then
  record "$restart" "finished" false
  say "finished at step $(saved_step)"
  end_chain
elif [[ $decided == yes ]]; then
  say "its last checkpoint is that of step $(saved_step)"
elif ! shown=$(patiently job); then
  record "$restart" "SLURM does not answer${reason:+ ($reason)}" false
  say "SLURM does not answer, so it cannot be requeued at step $(saved_step)${reason:+ ($reason, saved)}: submit it again"
  exit 1
elif [[ $(field JobState <<< "$shown") != RUNNING ]]; then  # somebody else ends this job, and decides
  restarts=$(field Restarts <<< "$shown")
  if (( ${restarts:-0} > restart )); then
    say "SLURM requeues it at step $(saved_step)"
  elif [[ $(field Reason <<< "$shown") == TimeLimit ]]; then
    time_is_up
  else
    record "$restart" "cancelled${reason:+ ($reason)}" false
    say "cancelled at step $(saved_step), not requeued${reason:+: $reason, saved}"
  fi
elif [[ $reason == SIG@(TERM|USR1) && $(field PreemptTime <<< "$shown") == [0-9]* ]]; then  # USR1: send_user_signal
  start_again "preempted"  # at once: leaving it to the end of the grace time would count as completed
elif [[ $reason == SIGUSR1 && $chain == yes ]]; then
  record "$restart" "SIGUSR1: time limit" false
  next=$(rest_of_chain | head -n 1)
  say "saved at step $(saved_step) before the time limit; ${next:+job }${next:-the chain is over, not finished: submit it again}${next:+ of the chain goes on}"
elif [[ $reason == SIGUSR1 ]]; then
  start_again "SIGUSR1: time limit"
elif [[ -n $reason ]]; then  # scancel --signal=TERM: a way to end a run that leaves it all the time it needs
  record "$restart" "$reason" false
  say "$reason: saved at step $(saved_step), not requeued"
  end_chain
else
  cat "$logs/srun.log"
  died=$(grep -oE '[^ ]+: tasks? [0-9,-]+: .*' "$logs/srun.log" | head -n 1)
  start_again "a rank died (${died:-exit code $code, no word of its end})"
fi
