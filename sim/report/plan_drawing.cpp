// A page of a plan to scale: lines of characters, or rectangles.

#include <fmt/format.h>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/graphviz.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <sstream>

#include "base/markup.h"
#include "reference/plan/page_segments.h"
#include "sim/report/plan_report.h"

namespace lockstep {
namespace {

constexpr std::int64_t kMapColumns = 72;
constexpr std::int64_t kSvgWidth = 960;
constexpr std::int64_t kSvgLeft = 200;
constexpr std::int64_t kSvgRow = 44;

constexpr char kSeveral = '#';

char symbol(const PageSegment& segment) {
  switch (segment.kind) {
    case SegmentKind::k:
      return 'K';
    case SegmentKind::v:
      return 'V';
    case SegmentKind::row:
      return 'R';
    case SegmentKind::state:
      return segment.part < 8 ? static_cast<char>('a' + segment.part) : 's';
    case SegmentKind::padding:
      return '.';
    case SegmentKind::empty_place:
      return '-';
  }
  return '?';
}

std::string_view colour(const PageSegment& segment) {
  constexpr std::array<std::string_view, 4> kStates{"#59a14f", "#8cd17d", "#b6992d", "#f1ce63"};
  switch (segment.kind) {
    case SegmentKind::k:
      return segment.layer % 2 == 0 ? "#4e79a7" : "#2f5d8a";
    case SegmentKind::v:
      return segment.layer % 2 == 0 ? "#a0cbe8" : "#7fb2d9";
    case SegmentKind::row:
      return "#b07aa1";
    case SegmentKind::state:
      return kStates[static_cast<std::size_t>(segment.part) % 4];
    case SegmentKind::padding:
      return "#d3d3d3";
    case SegmentKind::empty_place:
      return "#ff9d9a";
  }
  return "#000000";
}

std::string kind_text(const PageSegment& segment) {
  switch (segment.kind) {
    case SegmentKind::k:
      return "K";
    case SegmentKind::v:
      return "V";
    case SegmentKind::row:
      return "rows";
    case SegmentKind::state:
      return fmt::format("state {}", segment.part);
    case SegmentKind::padding:
      return "padding";
    case SegmentKind::empty_place:
      return "empty place of the pack";
  }
  return "?";
}

// A way to fill a page (the segments' `layer` is the position in the pack), and what fills pages
// that way.
struct Filling {
  std::vector<PageSegment> segments;
  std::vector<std::size_t> groups;   // ascending
  std::vector<std::size_t> tensors;  // ascending
  std::vector<std::string> names;  // of the layers of the first group in the first tensor, by place
  const LayerLayout* layout = nullptr;
};

void add_once(std::vector<std::size_t>& numbers, std::size_t number) {
  const auto at = std::ranges::lower_bound(numbers, number);
  if (at == numbers.end() || *at != number) numbers.insert(at, number);
}

// Every group in every tensor, merged where they fill a page the same way.
std::vector<Filling> fillings(const PlanReport& report) {
  std::vector<Filling> all;
  const KVCacheConfig& config = report.plan.workers.front();
  const PoolLayout& pool = report.pools.front();
  for (std::size_t g = 0; g < config.groups.size(); ++g)
    for (std::size_t t = 0; t < config.tensors.size(); ++t) {
      auto segments = page_segments(config, pool, g, static_cast<std::int32_t>(t));
      if (segments.empty()) continue;
      std::vector<std::string> names;
      const LayerLayout* layout = nullptr;
      std::int32_t first = -1;
      for (std::size_t i = 0; i < pool.groups[g].size(); ++i) {
        if (pool.groups[g][i].tensor_index != static_cast<std::int32_t>(t)) continue;
        if (first < 0) first = static_cast<std::int32_t>(i);
        layout = &pool.groups[g][i];
        names.push_back(config.groups[g].layer_names[i]);
      }
      for (PageSegment& segment : segments)
        if (segment.layer >= 0) segment.layer -= first;
      auto same = std::ranges::find(all, segments, &Filling::segments);
      if (same == all.end())
        same = all.insert(all.end(), {std::move(segments), {}, {}, std::move(names), layout});
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
std::string bar(const std::vector<PageSegment>& segments, std::int64_t begin, std::int64_t end,
                const std::function<char(const PageSegment&)>& symbol_of) {
  std::string columns;
  for (std::int64_t column = 0; column < kMapColumns; ++column) {
    const std::int64_t from = begin + (end - begin) * column / kMapColumns;
    const std::int64_t to = std::max(from + 1, begin + (end - begin) * (column + 1) / kMapColumns);
    std::array<std::int64_t, 128> bytes{};
    for (auto at = std::ranges::upper_bound(segments, from, {}, &PageSegment::end);
         at != segments.end() && at->begin < to; ++at)
      bytes[symbol_of(*at)] += std::min(to, at->end) - std::max(from, at->begin);
    const auto most = std::ranges::max_element(bytes);
    columns += 4 * *most >= 3 * (to - from) ? static_cast<char>(most - bytes.begin()) : kSeveral;
  }
  return columns;
}

// "a state 0: 73,728 bytes; K: 540,672 bytes in 33 runs".
std::string legend(const Filling& filling) {
  struct Total {
    PageSegment segment;
    std::int64_t bytes = 0;
    std::int64_t runs = 0;
  };
  std::vector<Total> totals;
  for (const PageSegment& segment : filling.segments) {
    auto same = std::ranges::find_if(
        totals, [&](const Total& t) { return symbol(t.segment) == symbol(segment); });
    if (same == totals.end()) same = totals.insert(totals.end(), {segment, 0, 0});
    same->bytes += segment.end - segment.begin;
    ++same->runs;
  }
  std::string text;
  for (const Total& total : totals) {
    const bool named = total.segment.kind == SegmentKind::k || total.segment.kind == SegmentKind::v;
    text += fmt::format("{}{}{}: {} bytes", text.empty() ? "" : "; ", symbol(total.segment),
                        named ? "" : " " + kind_text(total.segment), total.bytes);
    if (total.runs > 1) text += fmt::format(" in {} runs", total.runs);
  }
  return text;
}

// The first kernel block by itself, where a page has several; below it, whose layer each column is.
std::string kernel_block_lines(const Filling& filling) {
  const LayerLayout& layer = *filling.layout;
  if (layer.num_kv == 0 || layer.pair_order == PairOrder::kv_outermost) return {};
  const std::int64_t end =
      layer.blocks_per_kv_block > 1 ? layer.kernel_block_stride_bytes : filling.segments.back().end;
  std::string out;
  if (layer.blocks_per_kv_block > 1)
    out += fmt::format("  the first of {} kernel blocks of {} tokens, {} bytes:\n  |{}|\n",
                       layer.blocks_per_kv_block, layer.kernel_block_size, end,
                       bar(filling.segments, 0, end, symbol));
  if (filling.names.size() > 1) {
    const auto place = [](const PageSegment& segment) {
      return segment.layer < 0 ? ' ' : static_cast<char>('0' + segment.layer % 10);
    };
    out += fmt::format("   {}\n  places:", bar(filling.segments, 0, end, place));
    for (std::size_t i = 0; i < filling.names.size(); ++i)
      out += fmt::format(" {} {}", i, filling.names[i]);
    out += "\n";
  }
  return out;
}

void append_svg_row(const Filling& filling, std::int64_t top, std::string& out) {
  const double scale =
      static_cast<double>(kSvgWidth) / static_cast<double>(filling.segments.back().end);
  out += fmt::format("<text x=\"8\" y=\"{}\">groups {}, tensors {}</text>\n", top + 12,
                     numbers_text(filling.groups), numbers_text(filling.tensors));
  out += fmt::format("<text x=\"8\" y=\"{}\" fill=\"#666666\">{}</text>\n", top + 27,
                     escaped_for_markup(filling.names.front()));
  for (const PageSegment& segment : filling.segments) {
    const std::string whose =
        segment.layer < 0 ? std::string() : " of " + filling.names[segment.layer];
    out += fmt::format(
        "<rect x=\"{:.3f}\" y=\"{}\" width=\"{:.3f}\" height=\"30\" fill=\"{}\"><title>"
        "{}{}: bytes {} to {}</title></rect>\n",
        static_cast<double>(kSvgLeft) + static_cast<double>(segment.begin) * scale, top,
        static_cast<double>(segment.end - segment.begin) * scale, colour(segment),
        escaped_for_markup(kind_text(segment)), escaped_for_markup(whose), segment.begin,
        segment.end);
  }
}

struct Node {
  std::string name;  // unique
  std::string label;
  std::string shape;
};
using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::bidirectionalS, Node>;
using Vertex = boost::graph_traits<Graph>::vertex_descriptor;

// A text in DOT's quotes.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

Graph plan_graph(const KVCacheConfig& config) {
  Graph graph;
  std::map<std::string, Vertex> layers;
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const KVCacheGroupSpec& group = config.groups[g];
    const Vertex from =
        boost::add_vertex({fmt::format("group {}", g),
                           fmt::format("group {}: {}, {} tokens per block", g,
                                       name_of(group.spec.kind), group.spec.block_size),
                           "box"},
                          graph);
    for (const std::string& name : group.layer_names) {
      layers[name] = boost::add_vertex({name, name, "ellipse"}, graph);
      boost::add_edge(from, layers[name], graph);
    }
  }
  for (std::size_t t = 0; t < config.tensors.size(); ++t) {
    const Vertex to = boost::add_vertex(
        {fmt::format("tensor {}", t),
         fmt::format("tensor {}: {} bytes", t, config.tensors[t].size_bytes), "cylinder"},
        graph);
    for (const std::string& name : config.tensors[t].shared_by)
      boost::add_edge(layers.at(name), to, graph);
  }
  return graph;
}

}  // namespace

std::string plan_map(const PlanReport& report) {
  std::string out;
  for (const Filling& filling : fillings(report)) {
    const std::int64_t end = filling.segments.back().end;
    const bool behind =
        filling.layout->pair_order == PairOrder::kv_outermost && filling.layout->num_kv == 2;
    out += fmt::format(
        "{}a block of groups {} in tensors {}: {} bytes, a column is {:.0f}\n  |{}|\n"
        "  {}{}\n{}",
        out.empty() ? "" : "\n", numbers_text(filling.groups), numbers_text(filling.tensors), end,
        static_cast<double>(end) / kMapColumns, bar(filling.segments, 0, end, symbol),
        legend(filling), behind ? "; V follows the K of all blocks" : "",
        kernel_block_lines(filling));
  }
  if (out.empty()) return "no cache to draw\n";
  return out + "\n# several in one column. A block belongs to one group at a time.\n";
}

std::string plan_svg(const PlanReport& report) {
  const std::vector<Filling> rows = fillings(report);
  const auto height = static_cast<std::int64_t>(rows.size()) * kSvgRow + 60;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
      "font-family=\"monospace\" "
      "font-size=\"12\">\n<text x=\"8\" y=\"20\">{}: what a block holds, by owner</text>\n",
      kSvgLeft + kSvgWidth + 20, height, escaped_for_markup(report.model));
  std::int64_t top = 36;
  for (const Filling& filling : rows) {
    append_svg_row(filling, top, out);
    top += kSvgRow;
  }
  return out + "</svg>\n";
}

// Groups, layers and tensors of a plan as a graph that shows what is shared.

std::string plan_dot(const PlanReport& report) {
  const Graph graph = plan_graph(report.plan.workers.front());
  std::ostringstream out;
  boost::write_graphviz(
      out, graph,
      [&](std::ostream& node, Vertex v) {
        node << fmt::format("[label={}, shape={}]", quoted(graph[v].label), graph[v].shape);
      },
      boost::default_writer(),
      [&](std::ostream& head) { head << "rankdir=LR;\nlabel=" << quoted(report.model) << ";\n"; });
  return out.str();
}

}  // namespace lockstep
