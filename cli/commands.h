// Registers the subcommands of `lockstep`, one function each. When its command is chosen, it runs
// inside app.parse() and stores its exit status (cli/output/terminal.h) in `exit_code`. REQUIRES:
// `exit_code` outlives `app`.
//
// A command parses arguments, calls the libraries and prints; it computes nothing that another
// command or a test would need.
#pragma once

namespace CLI {
class App;
}

namespace lockstep {

void add_demo_command(CLI::App& app, int& exit_code);
void add_worker_command(CLI::App& app, int& exit_code);
void add_replay_command(CLI::App& app, int& exit_code);
void add_conform_command(CLI::App& app, int& exit_code);
void add_fit_command(CLI::App& app, int& exit_code);
void add_audit_command(CLI::App& app, int& exit_code);
void add_export_command(CLI::App& app, int& exit_code);
void add_engines_command(CLI::App& app, int& exit_code);
void add_diff_engines_command(CLI::App& app, int& exit_code);
void add_fuzz_command(CLI::App& app, int& exit_code);
void add_model_command(CLI::App& app, int& exit_code);
void add_layout_command(CLI::App& app, int& exit_code);
void add_capacity_command(CLI::App& app, int& exit_code);
void add_shrink_command(CLI::App& app, int& exit_code);
void add_same_command(CLI::App& app, int& exit_code);
void add_explain_command(CLI::App& app, int& exit_code);
void add_bisect_command(CLI::App& app, int& exit_code);
void add_pair_command(CLI::App& app, int& exit_code);
void add_mutants_command(CLI::App& app, int& exit_code);
void add_relations_command(CLI::App& app, int& exit_code);
void add_findings_command(CLI::App& app, int& exit_code);
void add_check_adapter_command(CLI::App& app, int& exit_code);
void add_python_commands(CLI::App& app, int& exit_code);

}  // namespace lockstep
