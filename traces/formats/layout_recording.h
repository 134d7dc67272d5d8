// Recorded memory plans of an engine (layouts.jsonl): one line per plan, its inputs and the
// engine's results. The README of the recordings describes the format.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json_reader.h"
#include "base/result.h"
#include "reference/plan/alignment.h"
#include "reference/types/plan_options.h"
#include "reference/types/view_types.h"

namespace lockstep {

using NamedViews = std::vector<std::pair<std::string, std::vector<TensorView>>>;

// The views of one layout and one pool, of the first layer of each set of equal layers of a group.
struct RecordedViews {
  std::string name;  // "NHD/2"
  CacheLayout layout = CacheLayout::NHD;
  std::int64_t num_blocks = 0;
  std::vector<std::int64_t> kernel_block_sizes;
  NamedViews views;
  // Model runner V2: the same views (neither is set), others, or a refusal.
  std::optional<NamedViews> second_runner;
  std::string second_runner_refused;
};

// A group as recorded: its spec, or the specs of its layers (uniform type).
struct RecordedGroup {
  KVCacheGroupSpec group;
  std::int64_t page_size_bytes = 0;
};

struct LayoutRecording {
  std::int64_t line = 0;
  std::string model;
  PlanOptions options;
  LayerSpecs layers;  // block sizes already aligned by the engine
  AlignedSizes aligned;
  std::string refused;  // why; empty: planned
  std::int64_t num_blocks = 0;
  std::vector<RecordedGroup> groups;
  std::vector<KVCacheTensor> tensors;
  double max_concurrency = 0;
  std::int64_t capacity_tokens = 0;
  std::vector<RecordedViews> views;
};

// "FILE:LINE: ..." where a line is not a plan.
Result<std::vector<LayoutRecording>> read_layout_recordings(const std::string& path);

// Each line of a file of plans, of either format: its document, number and text. Ends at the first
// that cannot be read.
using ReadLayoutLine =
    std::function<void(JsonValue root, std::int64_t line, std::string_view text)>;
Result<void> read_layout_lines(const std::string& path, const ReadLayoutLine& read);

}  // namespace lockstep
