// Who shares what: groups, layers and tensors of a plan as a graph.

#include <fmt/format.h>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/graphviz.hpp>
#include <map>
#include <sstream>

#include "sim/report/plan_report.h"

namespace lockstep {
namespace {

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
                           fmt::format("group {}: {}, {} tokens a block", g,
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
