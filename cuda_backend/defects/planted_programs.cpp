// Defects planted in a step's program, before the backend receives it.
#include <algorithm>
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

Seams zero_lost(const BackendConfig&) {
  return {.program = [](StepProgram& program) { program.zero.clear(); }};
}
Seams state_copy_lost(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    program.settled.clear();
    program.copies.clear();
  }};
}
Seams state_draft_reuse(const BackendConfig&) {
  return {
      .program = [drafts = LastDrafts{}](StepProgram& program) mutable { drafts.apply(program); }};
}
Seams optimistic_count(const BackendConfig&) {
  return {.program = [counts = OptimisticCounts{}](StepProgram& program) mutable {
    counts.apply(program);
  }};
}
Seams conv_offset_ignored(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    for (StateUpdate& update : program.state_updates) update.conv_offset = 0;
  }};
}
// The last token of every update, except a checkpoint's, advances the state again.
Seams state_pads_included(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
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
  }};
}
// The null block discards the checkpoint; the rest of the chunk is correct.
Seams checkpoint_lost(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    for (StateUpdate& update : program.state_updates)
      if (update.is_checkpoint) update.target = kNullBlock;
  }};
}
Seams checkpoint_early(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    for (std::size_t i = 0; i < program.state_updates.size(); ++i) {
      StateUpdate& update = program.state_updates[i];
      if (!update.is_checkpoint || update.num_tokens < 2) continue;
      StateUpdate& rest = program.state_updates[i + 1];
      --update.num_tokens;
      --rest.first_position;
      --rest.first_token;
      ++rest.num_tokens;
    }
  }};
}
Seams part_copy_lost(const BackendConfig&) {
  return {.program = [](StepProgram& program) { program.parts.clear(); }};
}
// Copies parts one step late.
Seams part_copy_late(const BackendConfig&) {
  return {.program = [late = std::vector<PartCopy>{}](StepProgram& program) mutable {
    std::swap(late, program.parts);
  }};
}
Seams stale_table_entry(const BackendConfig&) {
  return {
      .program = [tables = KeptTables{}](StepProgram& program) mutable { tables.apply(program); }};
}
Seams table_edit_lost(const BackendConfig&) {
  return {.program = [](StepProgram& program) { program.table_edits.clear(); }};
}
// The staging buffer still holds the block ids of the previous step.
Seams table_async_upload(const BackendConfig&) {
  return {.program = [before = std::vector<BlockId>{}](StepProgram& program) mutable {
    const std::vector<BlockId> now = program.table_block_ids;
    std::copy_n(before.begin(), std::min(before.size(), now.size()),
                program.table_block_ids.begin());
    before = now;
  }};
}
Seams transfer_wrong_end(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    reverse_sources(program.loads, &HostTransfer::host);
    reverse_sources(program.stores, &HostTransfer::block);
  }};
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
  auto tokens_per_row = std::make_shared<std::vector<std::int32_t>>();  // of each layer
  for (const KVCacheGroupSpec& group : config.plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      tokens_per_row->push_back(
          static_cast<std::int32_t>(group.layer_spec(i).tokens_per_state.tokens));
  return {.program = [tokens_per_row](StepProgram& program) {
    for (AttentionProbe& probe : program.probes) {
      const std::int32_t tokens = tokens_per_row->at(probe.layer);
      probe.last = (probe.last + tokens - 1) / tokens * tokens;
    }
  }};
}
// Attention reads one position before the recomputed window.
Seams replay_reads_before(const BackendConfig& config) {
  std::vector<std::int32_t> windows;  // of each layer; 0: it is not computed again
  for (const KVCacheGroupSpec& group : config.plan.groups)
    windows.insert(
        windows.end(), group.layer_names.size(),
        group.spec.bounded_replay ? static_cast<std::int32_t>(group.spec.sliding_window) : 0);
  return {.program = [windows](StepProgram& program) {
    for (AttentionProbe& probe : program.probes)
      for (const RowSlice& slice : program.rows)
        if (slice.row == probe.row && windows.at(probe.layer) > 1 && slice.replay_start > 0 &&
            probe.first == slice.replay_start)
          --probe.first;
  }};
}

// Encoder rows use the table of the batch's first request.
Seams cross_slots_of_another(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    for (EncoderSlice& slice : program.encoder_slices) slice.row = program.rows.front().row;
  }};
}
// Cross attention reads one row per token.
Seams cross_reads_causally(const BackendConfig& config) {
  std::vector<bool> is_cross;  // of each layer
  for (const KVCacheGroupSpec& group : config.plan.groups)
    is_cross.insert(is_cross.end(), group.layer_names.size(), is_cross_attention(group.spec));
  return {.program = [is_cross](StepProgram& program) {
    for (AttentionProbe& probe : program.probes) {
      if (!is_cross.at(probe.layer)) continue;
      const auto slice = std::ranges::find(program.rows, probe.row, &RowSlice::row);
      if (slice == program.rows.end()) continue;
      probe.last = std::min(probe.last, std::max(probe.first + 1, slice->num_tokens));
    }
  }};
}
Seams rswa_gap_read(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    for (AttentionQuery& query : program.queries) query.gap_first = query.gap_last = 0;
  }};
}

constexpr PlantedDefect kOfPrograms[] = {
    {"stale-table-entry", stale_table_entry},
    {"table-edit-lost", table_edit_lost},
    {"state-copy-lost", state_copy_lost},
    {"zero-lost", zero_lost},
    {"transfer-wrong-end", transfer_wrong_end},
    {"table-async-upload", table_async_upload},
    {"state-draft-reuse", state_draft_reuse, Needs::words},
    {"optimistic-count", optimistic_count},
    {"state-pads-included", state_pads_included, Needs::words},
    {"stale-nan", stale_nan, Needs::words},
    {"conv-offset-ignored", conv_offset_ignored, Needs::numbers},
    {"checkpoint-lost", checkpoint_lost},
    {"checkpoint-early", checkpoint_early},
    {"part-copy-lost", part_copy_lost},
    {"part-copy-late", part_copy_late},
    {"compressed-open-row", compressed_open_row},
    {"replay-reads-before", replay_reads_before},
    {"cross-slots-of-another", cross_slots_of_another},
    {"cross-reads-causally", cross_reads_causally},
    {"rswa-gap-read", rswa_gap_read, Needs::words},
};

}  // namespace

std::span<const PlantedDefect> defects_of_programs() { return kOfPrograms; }

// Defects planted in host pages: in their program, and in the copies and lookups of their
// rows.

namespace {

Seams page_mirror_short(const BackendConfig&) {
  return in_launches<MirrorRowsParams>([](MirrorRowsParams& params) { --params.num_tokens; });
}
// Evicted pages are still read on the device.
Seams page_residency_kept(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    std::erase_if(program.residency,
                  [](const TableEdit& edit) { return edit.block == kNullBlock; });
  }};
}
Seams page_restore_dropped(const BackendConfig& config) {
  std::vector<bool> is_resident;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    is_resident.push_back(is_resident_pages(group.spec.kind));
  return {.program = [is_resident](StepProgram& program) {
    std::erase_if(program.loads, [&](const HostTransfer& load) {
      return is_resident[static_cast<std::size_t>(load.group)];
    });
  }};
}
// Rows on the host are read from the null block.
Seams page_host_unread(const BackendConfig&) {
  return on_device(
      {.upload = [](const std::string& allocation, std::span<std::byte> bytes, Device&) {
        if (allocation != "layer caches") return;
        for (RowCache& rows : elements_of<RowCache>(bytes)) rows.away = nullptr;
      }});
}
// A request reuses the hot region of the previous request in its batch row.
Seams hot_region_kept(const BackendConfig&) {
  // The first launch initialises all regions.
  const auto is_first = std::make_shared<bool>(true);
  return in_launches<ClearRegionsParams>([is_first](ClearRegionsParams& params) {
    if (!std::exchange(*is_first, false)) params.num_rows = 0;
  });
}
constexpr PlantedDefect kOfPages[] = {
    {"rows-mirror-short", page_mirror_short},
    {"rows-residency-kept", page_residency_kept},
    {"rows-restore-dropped", page_restore_dropped},
    {"rows-host-unread", page_host_unread},
    {"hot-region-kept", hot_region_kept},
    {"hot-evicts-used", in_launcher<&KernelTable::hot_reads, &DefectKernels::evict_used>},
    {"hot-row-by-slot", in_launcher<&KernelTable::swap_rows, &DefectKernels::swap_by_slot>},
};

}  // namespace

std::span<const PlantedDefect> defects_of_pages() { return kOfPages; }

}  // namespace lockstep::cuda
