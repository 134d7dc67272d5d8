// Ends long work at SIGINT and SIGTERM.
//
// (1) The first signal sets a flag: the work ends after its current case or step, and still writes
//     its outputs.
// (2) The second signal ends the process at once, with status 128 + signal, and kills the process
//     groups that it started.
// (3) A signal within 200 ms of the first is the same one: `timeout` signals a process and then its
//     group.
//
// Without watch_stop_signals() the signals have their default action, and stop_requested() is
// false. A SIGINT that the parent process ignored stays ignored.
#pragma once

#include <sys/types.h>

namespace lockstep {

// Installs the handler. Called once, before the work.
void watch_stop_signals();
// True after the first signal. Cheap: one relaxed load, for a check per step.
bool stop_requested();
int stop_signal();  // the first signal; 0: none

// Called in a forked child. The parent decides when to end, so the child ignores the signals; the
// kernel kills it if the parent's thread that forked it ends (PR_SET_PDEATHSIG).
void leave_stop_signals_to_parent();

// Registers a process group that the second signal kills. A group beyond the 64th is not
// registered, and survives.
void add_group_to_kill(pid_t group);
void remove_group_to_kill(pid_t group);

}  // namespace lockstep
