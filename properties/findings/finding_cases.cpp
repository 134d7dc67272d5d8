#include "properties/findings/finding_cases.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include "properties/shrink/case_parts.h"
#include "reference/plan/capacity.h"
#include "reference/profiles/engine_profile.h"
#include "sim/recording/recording_workload.h"

namespace lockstep {
namespace {

using Names = std::string_view;

// Checks by which a finding may show. A finding has several, because the first check that fails
// depends on the release: the same reuse of a block may first be seen as a write, a read or a
// second owner.
constexpr Names kReads[] = {"audit.attention_read", "audit.state_read", "audit.token_write",
                            "audit.handed_out"};
constexpr Names kShared[] = {"audit.handed_out", "audit.attention_read", "audit.state_read",
                             "audit.token_write", "audit.zeroing"};
constexpr Names kWaits[] = {"liveness", "audit.standstill"};
constexpr Names kInFlight[] = {"audit.sampled", "audit.attention_read", "audit.scheduled_tokens"};
constexpr Names kStops[] = {"engine.exception"};
constexpr Names kKept[] = {"audit.planned_blocks", "liveness"};
constexpr Names kCut[] = {"audit.scheduled_tokens", "engine.exception"};
constexpr Names kDropped[] = {"audit.sampled", "audit.scheduled_tokens", "audit.stale_output",
                              "liveness", "engine.exception"};
constexpr Names kCounted[] = {"audit.conservation", "engine.exception"};

// Files in the order in which try_finding() runs them. Names with a release are recordings of that
// release; `.case.jsonl` are saved cases, which carry their clients.
constexpr Names kFiles1[] = {"vllm_0_22_1_state_hit_longer.jsonl",
                             "eagle_beside_states_alone.case.jsonl",
                             "state_hit_leaves_null_blocks.case.jsonl"};
constexpr Names kFiles2[] = {"vllm_0_22_1_second_group_not_cut.jsonl"};
constexpr Names kFiles3[] = {"vllm_0_22_1_preempted_in_its_own_step.jsonl",
                             "vllm_0_33_0_preempted_in_its_own_step.jsonl"};
constexpr Names kFiles4[] = {"vllm_0_22_1_window_freed_by_drafts.jsonl",
                             "vllm_0_33_0_window_freed_by_drafts.jsonl"};
constexpr Names kFiles5[] = {"states_in_flight_never_end.case.jsonl"};
constexpr Names kFiles6[] = {"slots_of_drafts_outgrow_a_window.case.jsonl"};
constexpr Names kFiles7[] = {"vllm_0_22_1_loaded_behind_large.jsonl"};
constexpr Names kFiles8[] = {
    "vllm_0_22_1_two_half_loaded.jsonl", "loads_behind_windows_without_room.case.jsonl",
    "loads_and_preemptions_in_turn.case.jsonl", "loads_without_room_for_drafts.case.jsonl"};
constexpr Names kFiles9[] = {
    "vllm_0_22_1_lost_block_left_alone.jsonl", "vllm_0_22_1_hit_of_void_row.jsonl",
    "lost_block_is_written_again.case.jsonl", "block_behind_a_window_lost_by_another.case.jsonl"};
constexpr Names kFiles10[] = {"vllm_0_22_1_fewer_drafts.jsonl"};
constexpr Names kFiles11[] = {"vllm_0_22_1_equal_arrivals.jsonl",
                              "vllm_0_33_0_equal_arrivals.jsonl"};
constexpr Names kFiles12[] = {"vllm_0_22_1_load_evicts_hit.jsonl"};
constexpr Names kFiles13[] = {"vllm_0_22_1_window_of_last_token.jsonl",
                              "client_leaves_while_its_window_loads.case.jsonl"};
constexpr Names kFiles14[] = {"vllm_0_22_1_back_without_window.jsonl"};
constexpr Names kFiles15[] = {"vllm_0_22_1_in_flight_behind_lost_block.jsonl",
                              "vllm_0_22_1_lost_block_left_behind.jsonl",
                              "vllm_0_22_1_preempted_before_loss_is_known.jsonl"};
constexpr Names kFiles16[] = {"vllm_0_33_0_checkpoint_over_running_state.jsonl"};
constexpr Names kFiles17[] = {"vllm_0_33_0_state_under_longer_prefix.jsonl"};
constexpr Names kFiles18[] = {"vllm_0_33_0_partial_hit_not_let_in.jsonl"};
constexpr Names kFiles19[] = {"vllm_0_33_0_padded_prompt_of_one_token.jsonl"};
constexpr Names kFiles20[] = {"states_before_gaps_never_end.case.jsonl",
                              "vllm_0_28_0_state_before_gap_is_kept.jsonl",
                              "vllm_0_28_0_state_before_gap_does_not_fit.jsonl"};
constexpr Names kFiles21[] = {"vllm_0_28_0_padded_request_is_cut.jsonl"};
constexpr Names kFiles22[] = {"vllm_0_22_1_reset_drops_later_output.jsonl",
                              "reset_leaves_a_request_waiting.case.jsonl",
                              "reset_again_takes_dropped_output.case.jsonl"};
constexpr Names kFiles23[] = {"vllm_0_22_1_load_shorter_than_hit.jsonl",
                              "load_shorter_than_hit.case.jsonl"};
constexpr Names kFiles25[] = {"vllm_0_33_0_replay_into_null_block.jsonl"};

constexpr FindingCases kFindings[] = {
    {1, "With EAGLE, a state hit is longer than the attention hit", kFiles1, kReads},
    {2, "A second full-attention group keeps blocks beyond the common hit", kFiles2, kShared},
    {3, "A request preempted in its own step leaves uncomputed blocks behind", kFiles3, kReads},
    {4, "A window is retired by a count that includes rejected drafts", kFiles4, kReads},
    {5, "With a step in flight, states outgrow the pool planned for them", kFiles5, kWaits, true,
     "the plan itself, which is made before a scheduler is there"},
    {6, "The pool of a window is planned without the slots of drafts", kFiles6, kWaits, true,
     "the plan itself, which is made before a scheduler is there"},
    {7, "A loaded request waits for one that does not fit", kFiles7, kWaits},
    {8, "Two partly loaded requests each need what the other holds", kFiles8, kWaits},
    {9, "A request that relies on another to recompute a lost block", kFiles9, kReads},
    {10, "A step with fewer drafts stops the engine", kFiles10, kStops},
    {11, "Requests of equal priority and arrival preempt each other forever", kFiles11, kWaits},
    {12, "Blocks for a load evict what another group has hit", kFiles12, kReads},
    {13, "A fully loaded prompt lacks the window of its last token", kFiles13, kReads},
    {14, "A request sent back to a lost block has freed the window before it", kFiles14, kReads},
    {15, "Output in flight after a lost block is kept", kFiles15, kInFlight},
    {16, "A checkpoint is exported over the running state", kFiles16, kReads, false,
     "the export, by the rule of the worker, which the audit follows"},
    {17, "The state of a hit is published under a longer prefix", kFiles17, kReads},
    {18, "A hit of a part of a block needs more than the pool is planned for", kFiles18, kWaits,
     true, "the plan itself, which is made before a scheduler is there"},
    {19, "A prompt of one token takes the drafts that pad it into its state", kFiles19, kReads,
     false, "the state, by the rule of the worker, which the audit follows"},
    {20, "A state before a gap in the table is kept until the request ends", kFiles20, kKept},
    {21, "A padded request that is cut to one token keeps its drafts", kFiles21, kCut, false,
     "the row that is sampled from"},
    {22, "A reset that preempts drops output of the steps after it", kFiles22, kDropped},
    {23,
     "A load shorter than another group's hit makes the pool count blocks that it does not have",
     kFiles23, kCounted},
    {25, "A window is computed again from a freed block", kFiles25, kReads, false,
     "the rows themselves, which a worker writes into the null block and reads there"},
};

// Returns true if `check` reports this finding. "liveness" also covers "liveness.head_of_line" and
// "liveness.partial_load": which one appears depends on which request of the cycle comes first.
bool is_check_of(const FindingCases& finding, std::string_view check) {
  return std::ranges::any_of(finding.checks, [&](std::string_view own) {
    return own == check || (own == "liveness" && check.starts_with("liveness"));
  });
}

// A case and its clients. `clients` is absent for a saved case, which contains its own.
struct FindingInputs {
  SavedCase saved;
  std::function<std::unique_ptr<Workload>()> clients;
};

// Reads a file and adapts it to the profile of the tested engine. Errors: the file cannot be read,
// or a tensor of the plan is not a whole number of pages.
Result<FindingInputs> read_case(const FindingCases& finding, const std::string& path,
                                const std::string& engine) {
  FindingInputs inputs;
  SavedCase& saved = inputs.saved;
  if (path.ends_with(".case.jsonl")) {
    LS_ASSIGN_OR_RETURN(saved, read_saved_case(path));
  } else {
    // A recording supplies only its events and samples; the tested engine makes its own decisions.
    // case_of() refuses a recording with a connector where the model decides, so the connector is
    // restored afterward.
    LS_ASSIGN_OR_RETURN(auto recording, read_recording(path));
    const auto connector = std::exchange(recording.header.connector, std::nullopt);
    LS_ASSIGN_OR_RETURN(saved, case_of(std::filesystem::path(path).stem().string(), recording));
    recording.header.connector = connector;
    saved.recording = recording;
    inputs.clients = [shared = std::make_shared<const Recording>(std::move(recording))] {
      return make_given_inputs(shared);
    };
  }
  saved.backend = "none";
  saved.engine.engine = engine;
  // Newer releases set two options by themselves, which older profiles refuse: sparse retention,
  // and block hashes that cover tokens after the block.
  const EngineProfile& profile = engine_profile(engine);
  if (profile.eagle_hits == EagleHits::drop_last_block) saved.engine.num_hash_lookahead_tokens = 0;
  if (!profile.retains_sparsely) saved.engine.prefix_cache_retention_interval = kDenseRetention;
  // Adds the null block. A release that plans the pool correctly gets the larger pool and passes.
  const std::int64_t planned = 1 + planned_blocks_of_request(saved.engine, saved.cache.groups);
  if (finding.is_of_plan && planned > saved.cache.num_blocks && !set_num_blocks(saved, planned))
    return fail(path + ": its pages are broken");
  return inputs;
}

// Classifies an outcome. A refused case is `unbuilt`: neither evidence for nor against the finding.
FindingVerdict verdict_of(const FindingCases& finding, const Outcome& outcome) {
  if (outcome.kind == OutcomeKind::refused) return FindingVerdict::unbuilt;
  if (!outcome.failed()) return FindingVerdict::absent;
  if (!is_check_of(finding, outcome.check)) return FindingVerdict::other;
  return outcome.check.starts_with("engine.") ? FindingVerdict::stops : FindingVerdict::shows;
}

// Ranks the evidence, strongest first: the finding itself, an exception by it, another failure, no
// harm, not tried. try_finding() keeps the strongest verdict of all files, the first file among
// equals.
int weight_of(FindingVerdict verdict) {
  switch (verdict) {
    case FindingVerdict::shows:
      return 4;
    case FindingVerdict::stops:
      return 3;
    case FindingVerdict::other:
      return 2;
    case FindingVerdict::absent:
      return 1;
    case FindingVerdict::unbuilt:
      return 0;
  }
  return 0;
}

}  // namespace

std::span<const FindingCases> finding_cases() { return kFindings; }

Result<FindingTrial> try_finding(const FindingCases& finding, const FindingTrialOptions& options) {
  FindingTrial told;
  for (const std::string_view file : finding.files) {
    const std::string path = (std::filesystem::path(options.folder) / file).string();
    LS_ASSIGN_OR_RETURN(const auto inputs, read_case(finding, path, options.engine));
    JudgeOptions judging{.decisions = options.decisions, .clients = inputs.clients};
    // Invariants need the model's scheduler, whose rules another engine need not share.
    judging.invariants = false;
    judging.scope = options.scope;
    Recording recording;
    judging.recording = &recording;
    const Outcome outcome = judge(inputs.saved, judging);
    FindingTrial trial{.verdict = verdict_of(finding, outcome),
                       .file = std::string(file),
                       .check = outcome.check,
                       .step = outcome.step,
                       .what = outcome.what,
                       .recording = std::move(recording)};
    if (told.file.empty() || weight_of(trial.verdict) > weight_of(told.verdict))
      told = std::move(trial);
    // No later file can give a stronger verdict.
    if (told.verdict == FindingVerdict::shows) break;
  }
  return told;
}

}  // namespace lockstep
