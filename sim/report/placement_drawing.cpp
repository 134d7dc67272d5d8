// A block of an overlaid pool to scale, as lines of characters and as rectangles; the plan as a
// graph; the plan as JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>

#include "base/check.h"
#include "base/json_writer.h"
#include "base/markup.h"
#include "base/number_text.h"
#include "sim/report/placement_report.h"

namespace lockstep {
namespace {

// Rows of one layer in a block: one run per kernel block, or one per head where heads are separate.
void add_row_runs(const LayerPage& layer, std::int64_t base, std::int64_t splits, bool is_outer,
                  std::vector<BlockRun>& runs) {
  const CachePage& page = layer.page;
  const std::int64_t of_head = page.rows * page.content_bytes;
  const bool is_one_run =
      page.heads == 1 || page.head_stride == page.content_bytes || page.head_stride == of_head;
  for (std::int64_t k = 0; k < splits; ++k) {
    if (is_one_run) {
      const std::int64_t begin = base + k * page.block_stride;
      runs.push_back({begin, begin + page.heads * of_head, layer.name});
      continue;
    }
    for (std::int64_t h = 0; h < page.heads; ++h) {
      const std::int64_t begin = is_outer ? base + k * page.block_stride + h * page.head_stride
                                          : base + (h * splits + k) * of_head;
      runs.push_back({begin, begin + of_head, layer.name});
    }
  }
}

void add_state_runs(const LayerPage& layer, std::int64_t base, std::vector<BlockRun>& runs) {
  for (std::size_t s = 0; s < layer.spec.states.size(); ++s) {
    std::int64_t bytes = itemsize_bytes(layer.spec.states[s].dtype);
    for (const std::int64_t dim : layer.spec.states[s].dims) bytes *= dim;
    runs.push_back({base, base + bytes, layer.name, static_cast<int>(s)});
    base += bytes;
  }
}

// A way to fill a block, and the groups that use it. Layers are numbered, so groups of other layers
// at the same positions are equal.
struct BlockFilling {
  std::vector<BlockRun> runs;
  std::vector<int> layers;  // of each run
  std::vector<std::size_t> groups;
};

std::vector<BlockFilling> block_fillings(const Placement& plan, const WorkerPages& pages) {
  std::vector<BlockFilling> all;
  const auto is_alike = [](const BlockFilling& a, const BlockFilling& b) {
    return a.layers == b.layers &&
           std::ranges::equal(a.runs, b.runs, [](const BlockRun& x, const BlockRun& y) {
             return x.begin == y.begin && x.end == y.end && x.state == y.state;
           });
  };
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    BlockFilling filling{block_runs(plan, pages, g), {}, {g}};
    if (filling.runs.empty()) continue;
    std::map<std::string, int> numbers;
    for (const BlockRun& run : filling.runs)
      filling.layers.push_back(
          numbers.emplace(run.layer, static_cast<int>(numbers.size())).first->second);
    const auto same = std::ranges::find_if(
        all, [&](const BlockFilling& other) { return is_alike(other, filling); });
    if (same == all.end())
      all.push_back(std::move(filling));
    else
      same->groups.push_back(g);
  }
  return all;
}

std::string stage_text(const PlacementReport& report, std::size_t w) {
  return report.placed.options.pp > 1 ? fmt::format("stage {}, ", w) : std::string();
}

std::string_view colour_of(const BlockRun& run, int layer) {
  constexpr std::array<std::string_view, 4> kStates{"#59a14f", "#8cd17d", "#b6992d", "#f1ce63"};
  constexpr std::array<std::string_view, 2> kRows{"#4e79a7", "#a0cbe8"};
  return run.state >= 0 ? kStates[static_cast<std::size_t>(run.state) % 4]
                        : kRows[static_cast<std::size_t>(layer) % 2];
}

std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

}  // namespace

std::vector<BlockRun> block_runs(const Placement& plan, const WorkerPages& pages,
                                 std::size_t group) {
  std::vector<BlockRun> runs;
  const bool is_outer = is_block_outermost(plan.order);
  std::int64_t regions = 0;  // of the layers before, where each has one
  for (const LayerPage& layer : pages.layers) {
    if (layer.group != group || layer.host_resident) continue;
    const auto tensor = std::ranges::find_if(plan.tensors, [&](const PlacedTensor& one) {
      return std::ranges::find(one.layers, layer.name) != one.layers.end();
    });
    LS_CHECK(tensor != plan.tensors.end(), "{} has no tensor", layer.name);
    const std::int64_t base = is_outer ? layer.page.offset : regions;
    if (is_state_kind(layer.spec.kind))
      add_state_runs(layer, base, runs);
    else
      add_row_runs(layer, base, layer.page.blocks / pages.num_blocks, is_outer, runs);
    if (!is_outer) regions += tensor->layer_stride / plan.num_blocks;
  }
  std::ranges::sort(runs, {}, &BlockRun::begin);
  return runs;
}

std::string placement_map(const PlacementReport& report) {
  constexpr std::size_t kWidth = 96;
  std::string out;
  for (std::size_t w = 0; w < report.placed.stages.workers.size(); ++w) {
    const Placement& plan = report.placed.stages.workers[w];
    const std::int64_t bytes = bytes_per_block(plan.groups, plan.order);
    out += fmt::format(
        "{}{}a block of {} bytes, {}; a letter is a layer, a dot is padding or unowned\n",
        w == 0 ? "" : "\n", stage_text(report, w), with_commas(bytes),
        is_block_outermost(plan.order) ? "in one piece" : "a page in the region of each layer");
    for (const BlockFilling& filling : block_fillings(plan, report.placed.pages[w])) {
      std::string bar(kWidth, '.');
      for (std::size_t i = 0; i < kWidth; ++i) {
        const std::int64_t at = bytes * static_cast<std::int64_t>(2 * i + 1) / (2 * kWidth);
        const auto run = std::ranges::upper_bound(filling.runs, at, {}, &BlockRun::end);
        if (run == filling.runs.end() || run->begin > at) continue;
        const int layer = filling.layers[static_cast<std::size_t>(run - filling.runs.begin())];
        bar[i] = static_cast<char>('a' + layer % 26);
      }
      out += fmt::format("  |{}|  group {}\n", bar, fmt::join(filling.groups, ", "));
    }
  }
  return out;
}

std::string placement_svg(const PlacementReport& report) {
  constexpr std::int64_t kLeft = 200, kWidth = 960, kRow = 44;
  std::string rows;
  std::int64_t top = 36;
  for (std::size_t w = 0; w < report.placed.stages.workers.size(); ++w) {
    const Placement& plan = report.placed.stages.workers[w];
    const std::int64_t bytes = bytes_per_block(plan.groups, plan.order);
    const double scale = static_cast<double>(kWidth) / static_cast<double>(bytes);
    for (const BlockFilling& filling : block_fillings(plan, report.placed.pages[w])) {
      rows += fmt::format("<text x=\"8\" y=\"{}\">{}groups {}</text>\n", top + 12,
                          stage_text(report, w), fmt::join(filling.groups, ", "));
      rows += fmt::format("<text x=\"8\" y=\"{}\" fill=\"#666666\">{}</text>\n", top + 27,
                          escaped_for_markup(filling.runs.front().layer));
      rows += fmt::format(
          "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"30\" fill=\"#d3d3d3\"><title>padding, or "
          "of "
          "other groups: a block has {} bytes</title></rect>\n",
          kLeft, top, kWidth, with_commas(bytes));
      for (std::size_t i = 0; i < filling.runs.size(); ++i) {
        const BlockRun& run = filling.runs[i];
        rows += fmt::format(
            "<rect x=\"{:.3f}\" y=\"{}\" width=\"{:.3f}\" height=\"30\" fill=\"{}\"><title>{} of "
            "{}: "
            "bytes {} to {}</title></rect>\n",
            static_cast<double>(kLeft) + static_cast<double>(run.begin) * scale, top,
            static_cast<double>(run.end - run.begin) * scale, colour_of(run, filling.layers[i]),
            run.state < 0 ? "rows" : fmt::format("state {}", run.state),
            escaped_for_markup(run.layer), run.begin, run.end);
      }
      top += kRow;
    }
  }
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
             "font-family=\"monospace\" font-size=\"12\">\n<text x=\"8\" y=\"20\">{}, order {}: "
             "what a "
             "block holds, by group</text>\n",
             kLeft + kWidth + 20, top + 24, escaped_for_markup(report.model),
             name_of(report.placed.stages.order->order)) +
         rows + "</svg>\n";
}

std::string placement_dot(const PlacementReport& report) {
  std::string out = fmt::format("digraph {{\nrankdir=LR;\nlabel={};\n", in_quotes(report.model));
  const auto node = [&](const std::string& name, const std::string& label, const char* shape) {
    out += fmt::format("{} [label={}, shape={}];\n", in_quotes(name), in_quotes(label), shape);
  };
  for (std::size_t w = 0; w < report.placed.stages.workers.size(); ++w) {
    const Placement& plan = report.placed.stages.workers[w];
    const std::string stage = stage_text(report, w);
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      const PlacedGroup& group = plan.groups[g];
      const std::string name = fmt::format("{}group {}", stage, g);
      node(name,
           fmt::format("{}: {}, {} tokens per block", name, planned_name_of(group.spec.kind),
                       group.spec.block_size),
           "box");
      for (const std::string& layer : group.layer_names) {
        node(layer, layer, "ellipse");
        out += fmt::format("{} -> {};\n", in_quotes(name), in_quotes(layer));
      }
    }
    for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
      const PlacedTensor& tensor = plan.tensors[t];
      const std::string name = fmt::format("{}tensor {}", stage, t);
      node(name,
           fmt::format("{}: from byte {}, layers every {}, blocks every {}", name, tensor.offset,
                       tensor.layer_stride, tensor.block_stride),
           "cylinder");
      for (const std::string& layer : tensor.layers)
        out += fmt::format("{} -> {};\n", in_quotes(layer), in_quotes(name));
    }
  }
  return out + "}\n";
}

}  // namespace lockstep
