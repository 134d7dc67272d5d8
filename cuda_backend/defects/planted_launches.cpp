// Defects planted in the parameters of launches, and in how launches are ordered and captured.
#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <optional>

#include "cuda_backend/defects/backend_mutants.h"
#include "cuda_backend/defects/planted_seams.h"

namespace lockstep::cuda {
namespace {

// Seams that change the parameters of one kind of launch: edit(Params&).
template <class Params, class Edit>
Seams in_launches(Edit edit) {
  return on_device({.launch = [edit](LaunchParams params, Operation&, Device&) mutable {
    if (auto** own = std::get_if<Params*>(&params)) edit(**own);
  }});
}

// Seams that change how many tokens' rows are written: change(made) of those that were made for the
// layer. Its inputs are filled right before.
template <class Change>
Seams in_rows_written(Change change, KernelDefect kernel = KernelDefect::none) {
  return on_device(
      {.launch =
           [change, made = std::int32_t{0}](LaunchParams params, Operation&, Device&) mutable {
             if (auto** fill = std::get_if<FillRowsParams*>(&params)) made = (*fill)->num_tokens;
             if (auto** write = std::get_if<WriteRowsParams*>(&params))
               (*write)->num_tokens = change(made);
             if (auto** write = std::get_if<WritePartsParams*>(&params))
               (*write)->num_tokens = change(made);
           },
       .kernel = kernel});
}

// Rows are cleared behind the appends of the step.
class LateClear {
 public:
  void launch(LaunchParams params, Device& behind) {
    if (auto** clear = std::get_if<TableClearParams*>(&params)) {
      held_back_ = **clear;
      (*clear)->num_rows = 0;
    }
    if (!std::holds_alternative<TableEditParams*>(params) || !held_back_) return;
    behind.launch(behind.kernels().clear_rows, *held_back_);
    held_back_.reset();
  }

 private:
  std::optional<TableClearParams> held_back_;
};

// Behind a step's tokens lie those of the step before, and are looked up as well.
class StaleTail {
 public:
  void begin_step(const StepProgram& program) {
    const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
    num_staged_ = std::max(num_tokens, std::min(num_staged_, program.num_padded_tokens));
    is_looked_up_ = false;
  }
  // Extractions look up tokens of their own later in the step.
  void launch(SlotMappingParams& params) {
    if (!is_looked_up_ && params.num_live_tokens == nullptr) params.num_tokens = num_staged_;
    is_looked_up_ = true;
  }

 private:
  std::int32_t num_staged_ = 0;
  bool is_looked_up_ = false;
};

bool brings_blocks(const Operation& operation) {
  return operation.name == "copy_blocks" || operation.name == "load_blocks";
}

}  // namespace

void reverse_scales(PartLayout& part) {
  if (part.scaling != Scaling::per_token_head) return;
  part.scales += (part.num_heads - 1) * part.scale_head_stride;
  part.scale_head_stride = -part.scale_head_stride;
}
void widen_window(SplitAttentionParams& params) {
  if (params.window > 0) ++params.window;
}

Seams drop_slot(const BackendConfig&) {
  return in_rows_written([](std::int32_t made) { return std::max(0, made - 1); });
}
Seams race(const BackendConfig&) {
  return in_rows_written([](std::int32_t made) { return made; }, KernelDefect::write_race);
}
Seams uninitialised_read(const BackendConfig&) {
  return in_launches<FillRowsParams>(
      [](FillRowsParams& params) { params.num_tokens = std::max(0, params.num_tokens - 1); });
}
Seams table_late_clear(const BackendConfig&) {
  return on_device(
      {.launch = [late = LateClear{}](LaunchParams params, Operation&, Device& behind) mutable {
        late.launch(params, behind);
      }});
}
Seams slot_pad_rows(const BackendConfig&) {
  return in_launches<SlotMappingParams>([](SlotMappingParams& params) { params.pad_slot = 0; });
}
Seams dp_idle_writes(const BackendConfig&) {
  return in_launches<SlotMappingParams>([](SlotMappingParams& params) {
    if (params.num_tokens == 0) params.pad_slot = 0;
  });
}
Seams slot_interleave_ignored(const BackendConfig&) {
  return in_launches<SlotMappingParams>([](SlotMappingParams& params) { params.interleave = 1; });
}
Seams slot_stale_tail(const BackendConfig&) {
  auto tail = std::make_shared<StaleTail>();
  Seams seams =
      in_launches<SlotMappingParams>([tail](SlotMappingParams& params) { tail->launch(params); });
  seams.program = [tail](StepProgram& program) { tail->begin_step(program); };
  return seams;
}
Seams graph_stale_param(const BackendConfig&) {
  return in_launches<SlotMappingParams>(
      [](SlotMappingParams& params) { params.num_live_tokens = nullptr; });
}
Seams graph_too_small(const BackendConfig&) { return on_device({.smaller_graphs = true}); }
Seams graph_stale_pointer(const BackendConfig&) { return on_device({.keeps_graphs = true}); }
// Blocks as far apart as their rows are long.
Seams hidden_flatten(const BackendConfig&) {
  return in_launches<GatherRowsParams>([](GatherRowsParams& params) {
    params.cache.block_stride = params.cache.token_stride * params.cache.block_size.value;
  });
}
Seams hidden_chunk_save(const BackendConfig&) {
  return in_launches<GatherRowsParams>(
      [](GatherRowsParams& params) { params.num_tokens = (params.num_tokens + 1) / 2; });
}
Seams scale_of_other_head(const BackendConfig&) {
  return on_device({.launch = [](LaunchParams params, Operation&, Device&) {
    if (auto** write = std::get_if<WritePartsParams*>(&params))
      for (PartWrite& part : (*write)->parts) reverse_scales(part.to);
    if (auto** attention = std::get_if<SplitAttentionParams*>(&params)) {
      reverse_scales((*attention)->key);
      reverse_scales((*attention)->value);
    }
  }});
}
Seams window_off_by_one(const BackendConfig&) {
  return in_launches<SplitAttentionParams>(widen_window);
}
// Nothing waits for a copy or a load of blocks, and a store of blocks waits for nothing.
Seams copy_unordered(const BackendConfig&) {
  return {.graph = [](std::span<const Operation> operations, StepGraph& graph) {
    boost::remove_edge_if(
        [&](const auto& edge) {
          return operations[boost::target(edge, graph)].name == "store_blocks" ||
                 brings_blocks(operations[boost::source(edge, graph)]);
        },
        graph);
  }};
}

}  // namespace lockstep::cuda
