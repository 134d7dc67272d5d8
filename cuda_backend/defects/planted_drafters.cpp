// Defects planted in the passes of a draft model: in their contents and in their slots.
#include <algorithm>
#include <limits>
#include <vector>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep::cuda {
namespace {

// Changes the contents of each row's passes: change(row, contents of the first pass, the rest).
template <class Change>
Seams in_contents(Change change) {
  return {.program = [change](StepProgram& program) {
    for (const DraftRow& row : program.draft_rows) {
      const auto all = std::span(program.draft_contents).subspan(row.first_content);
      change(row, all.first(row.num_tokens), all.subspan(row.num_tokens));
    }
  }};
}

Seams draft_token_unshifted(const BackendConfig&) {
  return in_contents([](const DraftRow&, std::span<std::uint64_t> first, auto) {
    std::shift_right(first.begin(), first.end(), 1);
  });
}
Seams draft_module_first(const BackendConfig& config) {
  if (config.drafter.shape != DraftShape::modules) return {};
  return in_contents([num_modules = config.drafter.num_drafts](const DraftRow& row,
                                                               std::span<std::uint64_t> first,
                                                               std::span<std::uint64_t> rest) {
    for (std::int32_t module = 1; module < num_modules; ++module)
      std::ranges::copy(first, rest.begin() + (module - 1) * row.num_tokens);
  });
}
// An accepted draft keeps the row that was written for it as a draft.
Seams draft_row_kept(const BackendConfig& config) {
  if (config.drafter.shape == DraftShape::modules) return {};
  return {.program = [](StepProgram& program) {
    for (DraftRow& row : program.draft_rows) {
      if (row.num_tokens < 2) continue;
      ++row.first_position;
      ++row.first_content;
      --row.num_tokens;
    }
  }};
}
Seams draft_rejected_counted(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    for (DraftRow& row : program.draft_rows) row.num_rejected = 0;
  }};
}
// Later modules do not rewrite the rows of rejected drafts.
Seams draft_not_run_again(const BackendConfig& config) {
  if (config.drafter.shape != DraftShape::modules) return {};
  return {.program = [num_modules = config.drafter.num_drafts](StepProgram& program) {
    for (std::size_t i = 0; i < program.draft_rows.size(); ++i) {
      DraftRow& row = program.draft_rows[i];
      const std::int32_t again = program.rows[i].first_position - row.first_position;
      if (again == 0) continue;
      std::vector<std::uint64_t> contents;
      for (std::int32_t module = 0; module < num_modules; ++module) {
        const auto of_module = program.draft_contents.begin() + row.first_content +
                               std::ptrdiff_t{module} * row.num_tokens;
        contents.insert(contents.end(), of_module + again, of_module + row.num_tokens);
      }
      row.first_position += again;
      row.num_tokens -= again;
      std::ranges::copy(contents, program.draft_contents.begin() + row.first_content);
    }
  }};
}

template <class Edit>
Seams in_slots(Edit edit) {
  return on_device({.launch = [edit](LaunchParams params, Operation&, Device&) {
    if (auto** slots = std::get_if<DraftSlotsParams*>(&params)) edit(**slots);
  }});
}
Seams draft_position_late(const BackendConfig&) {
  return in_slots([](DraftSlotsParams& params) { params.advance *= 2; });
}
Seams draft_position_stuck(const BackendConfig&) {
  return in_slots([](DraftSlotsParams& params) { params.advance = 0; });
}
Seams draft_unclamped(const BackendConfig&) {
  return in_slots([](DraftSlotsParams& params) {
    params.last_position = std::numeric_limits<std::int32_t>::max();
  });
}
// Every row seems as long as its table is wide.
Seams draft_past_table(const BackendConfig& config) {
  return in_lookups_of<DraftSlotsParams>(
      [rows = config.num_rows](std::span<GroupTable> tables, OwnTables& own, Device& behind) {
        std::vector<std::int32_t> lengths;
        for (const GroupTable& table : tables)
          lengths.insert(lengths.end(), static_cast<std::size_t>(rows), table.width);
        own.lengths.emplace(behind, "block table lengths of one kernel");
        std::int32_t* at = own.lengths->upload(lengths);
        for (GroupTable& table : tables) {
          table.lengths = at;
          at += rows;
        }
      });
}

constexpr PlantedDefect kOfDrafters[] = {
    {"draft-token-unshifted", draft_token_unshifted},
    {"draft-module-first", draft_module_first},
    {"draft-row-kept", draft_row_kept},
    {"draft-rejected-counted", draft_rejected_counted},
    {"draft-not-run-again", draft_not_run_again},
    {"draft-position-late", draft_position_late},
    {"draft-position-stuck", draft_position_stuck},
    {"draft-unclamped", draft_unclamped},
    {"draft-past-table", draft_past_table},
};

}  // namespace

std::span<const PlantedDefect> defects_of_drafters() { return kOfDrafters; }

}  // namespace lockstep::cuda
