// SIGINT and SIGTERM during long work.
//
// (1) The first signal sets a flag: the work ends after its current case or step and still writes
//     its outputs.
// (2) The second signal ends the process at once, with status 128 + signal, and kills the process
//     groups that it started.
// (3) A signal within 200 ms of the first is the same one: `timeout` signals a process and its
//     group.
//
// Without watch_stop_signals() no signal is caught and stop_requested() is false.
#pragma once

#include <sys/types.h>

namespace lockstep {

void watch_stop_signals();
bool stop_requested();
int stop_signal();  // the first signal; 0: none

// In a forked child: its parent decides when to end, and takes the child with it.
void leave_stop_signals_to_parent();

// Process groups that the second signal kills. A group beyond the 64th is not killed.
void add_group_to_kill(pid_t group);
void remove_group_to_kill(pid_t group);

}  // namespace lockstep
