// A block of a plan to scale: lines of characters, or rectangles. The plan as a graph.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/markup.h"
#include "base/number_text.h"
#include "sim/report/plan_report.h"

namespace lockstep {
namespace {

constexpr std::int64_t kMapColumns = 96;
constexpr std::int64_t kSvgWidth = 960, kSvgLeft = 200, kSvgRow = 44;
constexpr char kSeveral = '#';

char symbol(const BlockRun& run) {
  switch (run.kind) {
    case PartKind::k:
      return 'K';
    case PartKind::v:
      return 'V';
    case PartKind::row:
      return 'R';
    case PartKind::state:
      return run.part < 8 ? static_cast<char>('a' + run.part) : 's';
    case PartKind::padding:
      return '.';
    case PartKind::empty_place:
      return '-';
  }
  return '?';
}

std::string_view colour(const BlockRun& run) {
  constexpr std::array<std::string_view, 4> kStates{"#59a14f", "#8cd17d", "#b6992d", "#f1ce63"};
  switch (run.kind) {
    case PartKind::k:
    case PartKind::row:
      return run.layer % 2 == 0 ? "#4e79a7" : "#2f5d8a";
    case PartKind::v:
      return run.layer % 2 == 0 ? "#a0cbe8" : "#7fb2d9";
    case PartKind::state:
      return kStates[static_cast<std::size_t>(run.part) % 4];
    case PartKind::padding:
      return "#d3d3d3";
    case PartKind::empty_place:
      return "#ff9d9a";
  }
  return "#000000";
}

std::string kind_text(const BlockRun& run) {
  switch (run.kind) {
    case PartKind::k:
      return "K";
    case PartKind::v:
      return "V";
    case PartKind::row:
      return "rows";
    case PartKind::state:
      return fmt::format("state {}", run.part);
    case PartKind::padding:
      return "padding, or of other groups";
    case PartKind::empty_place:
      return "empty place of the pack";
  }
  return "?";
}

// A way to fill a block, and the groups and tensors whose blocks are filled so.
struct Filling {
  std::vector<BlockRun> runs;
  std::vector<std::size_t> groups, tensors;  // ascending
  std::vector<const LayerMemory*> layers;    // of the first group in the first tensor
};

void add_once(std::vector<std::size_t>& numbers, std::size_t number) {
  const auto at = std::ranges::lower_bound(numbers, number);
  if (at == numbers.end() || *at != number) numbers.insert(at, number);
}

std::vector<Filling> fillings(const MemoryPlan& plan) {
  std::vector<Filling> all;
  for (std::size_t g = 0; g < plan.layers_per_page.size(); ++g)
    for (std::size_t t = 0; t < plan.tensor_size_bytes.size(); ++t) {
      auto runs = block_runs(plan, g, t);
      if (runs.empty()) continue;
      auto same = std::ranges::find(all, runs, &Filling::runs);
      if (same == all.end())
        same = all.insert(all.end(), {std::move(runs), {}, {}, layers_in(plan, g, t)});
      add_once(same->groups, g);
      add_once(same->tensors, t);
    }
  return all;
}

// "0-11", "3", "0, 2-4".
std::string numbers_text(const std::vector<std::size_t>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    text += text.empty() ? "" : ", ";
    text += end - i == 1 ? fmt::format("{}", numbers[i])
                         : fmt::format("{}-{}", numbers[i], numbers[end - 1]);
    i = end;
  }
  return text;
}

// A bar of the bytes [begin, end): each column shows what most of it is, or # for no majority.
template <class SymbolOf>
std::string bar(const std::vector<BlockRun>& runs, std::int64_t begin, std::int64_t end,
                const SymbolOf& symbol_of) {
  std::string columns;
  for (std::int64_t column = 0; column < kMapColumns; ++column) {
    const std::int64_t from = begin + (end - begin) * column / kMapColumns;
    const std::int64_t to = std::max(from + 1, begin + (end - begin) * (column + 1) / kMapColumns);
    std::array<std::int64_t, 128> bytes{};
    for (auto at = std::ranges::upper_bound(runs, from, {}, &BlockRun::end);
         at != runs.end() && at->begin < to; ++at)
      bytes[static_cast<std::size_t>(symbol_of(*at))] +=
          std::min(to, at->end) - std::max(from, at->begin);
    const auto most = std::ranges::max_element(bytes);
    columns += 4 * *most >= 3 * (to - from) ? static_cast<char>(most - bytes.begin()) : kSeveral;
  }
  return columns;
}

// "a state 0: 73728 bytes; K: 540672 bytes in 33 runs".
std::string legend(const Filling& filling) {
  struct Total {
    BlockRun run;
    std::int64_t bytes = 0, runs = 0;
  };
  std::vector<Total> totals;
  for (const BlockRun& run : filling.runs) {
    auto same =
        std::ranges::find_if(totals, [&](const Total& t) { return symbol(t.run) == symbol(run); });
    if (same == totals.end()) same = totals.insert(totals.end(), {run, 0, 0});
    same->bytes += run.end - run.begin;
    ++same->runs;
  }
  std::string text;
  for (const Total& total : totals) {
    const bool is_named = total.run.kind == PartKind::k || total.run.kind == PartKind::v;
    text += fmt::format("{}{}{}: {} bytes", text.empty() ? "" : "; ", symbol(total.run),
                        is_named ? "" : " " + kind_text(total.run), total.bytes);
    if (total.runs > 1) text += fmt::format(" in {} runs", total.runs);
  }
  return text;
}

// The layer of each column; the first kernel block by itself, where a block has several.
std::string closer_lines(const Filling& filling) {
  const LayerMemory& layer = *filling.layers.front();
  const std::int64_t end = filling.runs.back().end;
  std::string out;
  if (filling.layers.size() > 1) {
    const auto letter = [](const BlockRun& run) {
      return run.layer < 0 ? ' ' : static_cast<char>('a' + run.layer % 26);
    };
    out += fmt::format("   {}\n  layers:", bar(filling.runs, 0, end, letter));
    constexpr std::size_t kNamedMax = 8;
    for (std::size_t i = 0; i < filling.layers.size(); ++i) {
      const bool is_named = filling.layers.size() <= kNamedMax || i + 1 == filling.layers.size();
      if (i == 0 || is_named)
        out += fmt::format(" {} {}", static_cast<char>('a' + i % 26), filling.layers[i]->name);
      else if (i == 1)
        out += " ..";
    }
    out += "\n";
  }
  const PartRows& part = layer.parts.front();
  const bool is_apart = layer.regions.size() > 1 || part.kernel_blocks == 1;
  if (is_apart || filling.layers.size() > 1) return out;
  return out + fmt::format("  the first of {} kernel blocks of {} rows, {} bytes:\n  |{}|\n",
                           part.kernel_blocks, part.rows, part.kernel_block_stride,
                           bar(filling.runs, 0, part.kernel_block_stride, symbol));
}

std::string stage_text(const PlanReport& report, std::size_t w) {
  return report.workers.size() > 1 ? fmt::format("stage {}, ", w) : std::string();
}

void append_svg_row(const Filling& filling, const std::string& stage, std::int64_t top,
                    std::string& out) {
  const double scale =
      static_cast<double>(kSvgWidth) / static_cast<double>(filling.runs.back().end);
  out += fmt::format("<text x=\"8\" y=\"{}\">{}groups {}, tensors {}</text>\n", top + 12, stage,
                     numbers_text(filling.groups), numbers_text(filling.tensors));
  out += fmt::format("<text x=\"8\" y=\"{}\" fill=\"#666666\">{}</text>\n", top + 27,
                     escaped_for_markup(filling.layers.front()->name));
  for (const BlockRun& run : filling.runs) {
    const std::string owner =
        run.layer < 0 ? "" : " of " + filling.layers[static_cast<std::size_t>(run.layer)]->name;
    out += fmt::format(
        "<rect x=\"{:.3f}\" y=\"{}\" width=\"{:.3f}\" height=\"30\" fill=\"{}\"><title>"
        "{}{}: bytes {} to {}</title></rect>\n",
        static_cast<double>(kSvgLeft) + static_cast<double>(run.begin) * scale, top,
        static_cast<double>(run.end - run.begin) * scale, colour(run),
        escaped_for_markup(kind_text(run)), escaped_for_markup(owner), run.begin, run.end);
  }
}

// A text in DOT's quotes.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

}  // namespace

std::string plan_map(const PlanReport& report) {
  std::string out;
  for (std::size_t w = 0; w < report.workers.size(); ++w)
    for (const Filling& filling : fillings(report.workers[w].memory)) {
      const std::int64_t end = filling.runs.back().end;
      const bool is_pair = filling.runs.front().kind == PartKind::k;
      const bool is_after = is_pair && filling.layers.front()->regions.size() > 1;
      out += fmt::format(
          "{}{}a block of groups {} in tensors {}: {} bytes, a column is {:.0f}\n  |{}|\n"
          "  {}{}\n{}",
          out.empty() ? "" : "\n", stage_text(report, w), numbers_text(filling.groups),
          numbers_text(filling.tensors), end, static_cast<double>(end) / kMapColumns,
          bar(filling.runs, 0, end, symbol), legend(filling),
          is_after ? "; V follows the K of all blocks" : "", closer_lines(filling));
    }
  if (out.empty()) return "no cache to draw\n";
  return out + "\n# several in one column. A block belongs to one group at a time.\n";
}

std::string plan_svg(const PlanReport& report) {
  std::string rows;
  std::int64_t top = 36;
  for (std::size_t w = 0; w < report.workers.size(); ++w)
    for (const Filling& filling : fillings(report.workers[w].memory)) {
      append_svg_row(filling, stage_text(report, w), top, rows);
      top += kSvgRow;
    }
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
             "font-family=\"monospace\" font-size=\"12\">\n<text x=\"8\" y=\"20\">{}: what a block "
             "holds, by group</text>\n",
             kSvgLeft + kSvgWidth + 20, top + 24, escaped_for_markup(report.model)) +
         rows + "</svg>\n";
}

std::string plan_dot(const PlanReport& report) {
  std::string out = fmt::format("digraph {{\nrankdir=LR;\nlabel={};\n", quoted(report.model));
  const auto node = [&](const std::string& name, const std::string& label, const char* shape) {
    out += fmt::format("{} [label={}, shape={}];\n", quoted(name), quoted(label), shape);
  };
  for (std::size_t w = 0; w < report.workers.size(); ++w) {
    const std::string stage = stage_text(report, w);
    const WorkerReport& worker = report.workers[w];
    for (std::size_t g = 0; g < worker.groups.size(); ++g) {
      const std::string name = fmt::format("{}group {}", stage, g);
      node(name, fmt::format("{}: {}", name, worker.groups[g].label), "box");
      for (const std::string& layer : worker.groups[g].layers) {
        node(layer, layer, "ellipse");
        out += fmt::format("{} -> {};\n", quoted(name), quoted(layer));
      }
    }
    for (std::size_t t = 0; t < worker.tensors.size(); ++t) {
      const std::string name = fmt::format("{}tensor {}", stage, t);
      node(name, fmt::format("{}: {}", name, worker.tensors[t].label), "cylinder");
      for (const std::string& layer : worker.tensors[t].layers)
        out += fmt::format("{} -> {};\n", quoted(layer), quoted(name));
    }
  }
  return out + "}\n";
}

}  // namespace lockstep
