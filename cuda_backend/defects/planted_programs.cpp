// Defects planted in a step's program, before the backend receives it, in the passes of a draft
// model, and in host pages.
#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep::cuda {

namespace {

bool same_chain(const StateUpdate& a, const StateUpdate& b) {
  return a.row == b.row && a.group == b.group;
}

// The tables of a device that never clears rows.
class KeptTables {
 public:
  // Extends each update to the row's old end, so that rows never shrink.
  void apply(StepProgram& program) {
    program.clear_rows.clear();
    for (TableUpdate& update : program.table_updates) {
      std::vector<BlockId>& row = rows_[{update.group, update.row}];
      const std::size_t end = update.first + update.count;
      if (row.size() < end) row.resize(end);
      std::copy_n(program.table_block_ids.begin() + update.begin, update.count,
                  row.begin() + update.first);
      if (row.size() == end) continue;
      update.begin = static_cast<std::uint32_t>(program.table_block_ids.size());
      update.count = static_cast<std::uint32_t>(row.size()) - update.first;
      program.table_block_ids.insert(program.table_block_ids.end(), row.begin() + update.first,
                                     row.end());
    }
    for (const TableEdit& edit : program.table_edits) {
      std::vector<BlockId>& row = rows_[{edit.group, edit.row}];
      if (std::cmp_less(edit.index, row.size())) row[edit.index] = edit.block;
    }
  }

 private:
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<BlockId>> rows_;  // group, row
};

// An update continues from the last draft of its row's previous step, accepted or not.
class LastDrafts {
 public:
  void apply(StepProgram& program) {
    const std::vector<StateUpdate> now = program.state_updates;
    for (std::size_t i = 0; i < now.size(); ++i)
      if (i == 0 || !same_chain(now[i], now[i - 1]))
        program.state_updates[i].source = source_of(now[i]);
    before_ = now;
  }

 private:
  BlockId source_of(const StateUpdate& update) const {
    BlockId last = update.source;
    bool goes_on = false;
    for (const StateUpdate& before : before_) {
      if (!same_chain(before, update)) continue;
      goes_on |= before.target == update.source;
      last = before.target;
    }
    return goes_on ? last : update.source;
  }

  std::vector<StateUpdate> before_;
};

// A row continues after the last draft of its previous step, accepted or not.
class OptimisticCounts {
 public:
  void apply(StepProgram& program) {
    for (const std::int32_t row : program.clear_rows) ends_.erase(row);
    for (const TableUpdate& update : program.table_updates)
      if (update.first == 0) ends_.erase(update.row);
    for (RowSlice& slice : program.rows) {
      const auto [end, is_first] = ends_.try_emplace(slice.row, slice.first_position);
      const std::int32_t counted = std::max(slice.first_position, end->second);
      end->second = slice.first_position + slice.num_tokens;
      slice.first_position = counted;
    }
  }

 private:
  std::map<std::int32_t, std::int32_t> ends_;  // by row, of the previous step
};

// Reverses the sources of a group's transfers: the last blocks come from the places of the first.
template <class Source>
void reverse_sources(std::vector<HostTransfer>& transfers, Source source) {
  std::map<std::int32_t, std::vector<HostTransfer*>> by_group;
  for (HostTransfer& transfer : transfers) by_group[transfer.group].push_back(&transfer);
  for (auto& [group, of_group] : by_group)
    for (std::size_t i = 0, j = of_group.size() - 1; i < j; ++i, --j)
      std::swap(of_group[i]->*source, of_group[j]->*source);
}

// Changes the contents of each row's passes: change(row, contents of the first pass, the rest).
template <class Change>
Seams in_contents(Change change) {
  return in_program([change](StepProgram& program) {
    for (const DraftRow& row : program.draft_rows) {
      const auto all = std::span(program.draft_contents).subspan(row.first_content);
      change(row, all.first(row.num_tokens), all.subspan(row.num_tokens));
    }
  });
}

// Queries read their last kernel block to its end.
Seams stale_nan(const BackendConfig& config) {
  auto blocks = std::make_shared<std::vector<std::int64_t>>();  // kernel block size of each layer
  return {.share =
              [blocks, sizes = config.kernel_block_sizes](const BackendConfig&, RankShare& share) {
                for (std::size_t g = 0; g < share.plan.groups.size(); ++g)
                  blocks->insert(blocks->end(), share.plan.groups[g].layer_names.size(), sizes[g]);
              },
          .program =
              [blocks](StepProgram& program) {
                for (AttentionQuery& query : program.queries) {
                  const auto size = static_cast<std::int32_t>(blocks->at(query.layer));
                  query.last = (query.last + size - 1) / size * size;
                }
              }};
}
// Reads include the compressed row that is not complete.
Seams compressed_open_row(const BackendConfig& config) {
  const auto tokens_per_row = by_layer(config.plan, [](const auto& group, std::size_t i) {
    return static_cast<std::int32_t>(group.layer_spec(i).tokens_per_state.tokens);
  });
  return in_program([tokens_per_row](StepProgram& program) {
    for (AttentionProbe& probe : program.probes) {
      const std::int32_t tokens = tokens_per_row.at(probe.layer);
      probe.last = (probe.last + tokens - 1) / tokens * tokens;
    }
  });
}
// Attention reads one position before the recomputed window.
Seams replay_reads_before(const BackendConfig& config) {
  // 0: the layer is not computed again.
  const auto windows = by_layer(config.plan, [](const auto& group, std::size_t) {
    return group.spec.bounded_replay ? group.spec.sliding_window : 0;
  });
  return in_program([windows](StepProgram& program) {
    for (AttentionProbe& probe : program.probes)
      for (const RowSlice& slice : program.rows)
        if (slice.row == probe.row && windows.at(probe.layer) > 1 && slice.replay_start > 0 &&
            probe.first == slice.replay_start)
          --probe.first;
  });
}
// Cross attention reads one row per token.
Seams cross_reads_causally(const BackendConfig& config) {
  const auto is_cross = by_layer(
      config.plan, [](const auto& group, std::size_t) { return is_cross_attention(group.spec); });
  return in_program([is_cross](StepProgram& program) {
    for (AttentionProbe& probe : program.probes) {
      if (!is_cross.at(probe.layer)) continue;
      const auto slice = std::ranges::find(program.rows, probe.row, &RowSlice::row);
      if (slice == program.rows.end()) continue;
      probe.last = std::min(probe.last, std::max(probe.first + 1, slice->num_tokens));
    }
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
  return in_program([](StepProgram& program) {
    for (DraftRow& row : program.draft_rows) {
      if (row.num_tokens < 2) continue;
      ++row.first_position;
      ++row.first_content;
      --row.num_tokens;
    }
  });
}
// Later modules do not rewrite the rows of rejected drafts.
Seams draft_not_run_again(const BackendConfig& config) {
  if (config.drafter.shape != DraftShape::modules) return {};
  return in_program([num_modules = config.drafter.num_drafts](StepProgram& program) {
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
  });
}
// Every row seems as long as its table is wide.
Seams draft_past_table(const BackendConfig& config) {
  return in_copy_of(kTables, &DraftSlotsParams::groups,
                    [rows = config.num_rows](std::span<GroupTable> tables, OwnCopy<GroupTable>& own,
                                             Device& behind) {
                      std::vector<std::int32_t> lengths;
                      for (const GroupTable& table : tables)
                        lengths.insert(lengths.end(), static_cast<std::size_t>(rows), table.width);
                      own.lengths.emplace(behind, "block table lengths of one kernel");
                      std::int32_t* at = own.lengths->upload(lengths);
                      for (GroupTable& table : tables) table.lengths = std::exchange(at, at + rows);
                    })(config);
}
Seams page_restore_dropped(const BackendConfig& config) {
  std::vector<bool> is_resident;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    is_resident.push_back(is_resident_pages(group.spec.kind));
  return in_program([is_resident](StepProgram& program) {
    std::erase_if(program.loads, [&](const HostTransfer& load) {
      return is_resident[static_cast<std::size_t>(load.group)];
    });
  });
}
// A request reuses the hot region of the previous request in its batch row.
Seams hot_region_kept(const BackendConfig&) {
  // The first launch initialises all regions.
  return in_launches([is_first = true](ClearRegionsParams& params) mutable {
    if (!std::exchange(is_first, false)) params.num_rows = 0;
  });
}

const PlantedDefect kOfPrograms[] = {
    {"stale-table-entry",
     in_program([tables = KeptTables{}](StepProgram& program) mutable { tables.apply(program); })},
    {"table-edit-lost", in_program([](StepProgram& program) { program.table_edits.clear(); })},
    {"state-copy-lost", in_program([](StepProgram& program) {
       program.settled.clear();
       program.copies.clear();
     })},
    {"zero-lost", in_program([](StepProgram& program) { program.zero.clear(); })},
    {"transfer-wrong-end", in_program([](StepProgram& program) {
       reverse_sources(program.loads, &HostTransfer::host);
       reverse_sources(program.stores, &HostTransfer::block);
     })},
    // The staging buffer still holds the block ids of the previous step.
    {"table-async-upload",
     in_program([before = std::vector<BlockId>{}](StepProgram& program) mutable {
       const std::vector<BlockId> now = program.table_block_ids;
       std::copy_n(before.begin(), std::min(before.size(), now.size()),
                   program.table_block_ids.begin());
       before = now;
     })},
    {"state-draft-reuse",
     in_program([drafts = LastDrafts{}](StepProgram& program) mutable { drafts.apply(program); }),
     Needs::words},
    {"optimistic-count", in_program([counts = OptimisticCounts{}](StepProgram& program) mutable {
       counts.apply(program);
     })},
    // The last token of every update, except a checkpoint's, advances the state again.
    {"state-pads-included", in_program([](StepProgram& program) {
       std::vector<StateUpdate> updates;
       for (const StateUpdate& update : program.state_updates) {
         updates.push_back(update);
         if (update.is_checkpoint) continue;
         StateUpdate again = update;
         again.source = update.target;
         again.first_position += update.num_tokens - 1;
         again.first_token += update.num_tokens - 1;
         again.num_tokens = 1;
         updates.push_back(again);
       }
       program.state_updates = std::move(updates);
     }),
     Needs::words},
    {"stale-nan", stale_nan, Needs::words},
    {"conv-offset-ignored", in_program([](StepProgram& program) {
       for (StateUpdate& update : program.state_updates) update.conv_offset = 0;
     }),
     Needs::numbers},
    // The null block discards the checkpoint; the rest of the chunk is correct.
    {"checkpoint-lost", in_program([](StepProgram& program) {
       for (StateUpdate& update : program.state_updates)
         if (update.is_checkpoint) update.target = kNullBlock;
     })},
    {"checkpoint-early", in_program([](StepProgram& program) {
       for (std::size_t i = 0; i < program.state_updates.size(); ++i) {
         StateUpdate& update = program.state_updates[i];
         if (!update.is_checkpoint || update.num_tokens < 2) continue;
         StateUpdate& rest = program.state_updates[i + 1];
         --update.num_tokens;
         --rest.first_position;
         --rest.first_token;
         ++rest.num_tokens;
       }
     })},
    {"part-copy-lost", in_program([](StepProgram& program) { program.parts.clear(); })},
    // Copies parts one step late.
    {"part-copy-late", in_program([late = std::vector<PartCopy>{}](StepProgram& program) mutable {
       std::swap(late, program.parts);
     })},
    {"compressed-open-row", compressed_open_row},
    {"replay-reads-before", replay_reads_before},
    // Encoder rows use the table of the batch's first request.
    {"cross-slots-of-another", in_program([](StepProgram& program) {
       for (EncoderSlice& slice : program.encoder_slices) slice.row = program.rows.front().row;
     })},
    {"cross-reads-causally", cross_reads_causally},
    {"rswa-gap-read", in_program([](StepProgram& program) {
       for (AttentionQuery& query : program.queries) query.gap_first = query.gap_last = 0;
     }),
     Needs::words},

    {"draft-token-unshifted",
     in_contents([](const DraftRow&, std::span<std::uint64_t> first, auto) {
       std::shift_right(first.begin(), first.end(), 1);
     })},
    {"draft-module-first", draft_module_first},
    {"draft-row-kept", draft_row_kept},
    {"draft-rejected-counted", in_program([](StepProgram& program) {
       for (DraftRow& row : program.draft_rows) row.num_rejected = 0;
     })},
    {"draft-not-run-again", draft_not_run_again},
    {"draft-position-late", in_launches([](DraftSlotsParams& params) { params.advance *= 2; })},
    {"draft-position-stuck", in_launches([](DraftSlotsParams& params) { params.advance = 0; })},
    {"draft-unclamped", in_launches([](DraftSlotsParams& params) {
       params.last_position = std::numeric_limits<std::int32_t>::max();
     })},
    {"draft-past-table", draft_past_table},

    {"rows-mirror-short", in_launches([](MirrorRowsParams& params) { --params.num_tokens; })},
    // Evicted pages are still read on the device.
    {"rows-residency-kept", in_program([](StepProgram& program) {
       std::erase_if(program.residency,
                     [](const TableEdit& edit) { return edit.block == kNullBlock; });
     })},
    {"rows-restore-dropped", page_restore_dropped},
    // Rows on the host are read from the null block.
    {"rows-host-unread", in_elements("layer caches", [](RowCache& rows) { rows.away = nullptr; })},
    {"hot-region-kept", hot_region_kept},
    {"hot-evicts-used", in_launcher<&KernelTable::hot_reads, &DefectKernels::evict_used>()},
    {"hot-row-by-slot", in_launcher<&KernelTable::swap_rows, &DefectKernels::swap_by_slot>()},
};

}  // namespace

std::span<const PlantedDefect> defects_of_programs() { return kOfPrograms; }

}  // namespace lockstep::cuda
