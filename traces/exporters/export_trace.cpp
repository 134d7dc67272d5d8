// Which prefixes prompts share, hash ids for them, and the rows of the formats.
#include "traces/exporters/export_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/json_writer.h"
#include "base/number_text.h"

namespace lockstep {
namespace {

// Identity of a token: a symbolic token is identified by (hash id, position), which equals no other
// token; all others by their id.
struct TokenIdentity {
  bool is_symbolic = false;
  std::uint64_t seed = 0;
  std::int64_t token = 0;
  auto operator<=>(const TokenIdentity&) const = default;
};

// Identity of token `i` of a run. A position within a symbolic run includes the run's start, so
// that the tail of a cut run keeps its identity.
TokenIdentity identity_of(const Prompt& prompt, const TokenRun& run, std::uint32_t i) {
  switch (run.kind) {
    case TokenRun::Kind::symbolic:
      return {true, run.seed, run.first + i};
    case TokenRun::Kind::seeded:
    case TokenRun::Kind::repeated:
      return {false, 0, token_of(run, run.first + i)};
    case TokenRun::Kind::literal:
      break;
  }
  return {false, 0, prompt.tokens[run.first + i]};
}

// A position in a prompt that moves forward, run by run. REQUIRES: not at_end(), except for
// at_end() itself.
class Walk {
 public:
  explicit Walk(const Prompt& prompt) : prompt_(prompt) {}
  bool at_end() const { return run_ == prompt_.runs.size(); }
  std::uint32_t left() const { return prompt_.runs[run_].count - i_; }  // in this run
  TokenIdentity token() const { return identity_of(prompt_, prompt_.runs[run_], i_); }
  // True if both prompts have equal tokens up to the end of the shorter of the two runs. Literal
  // runs are compared token by token instead.
  bool runs_like(const Walk& other) const {
    const TokenRun& mine = prompt_.runs[run_];
    const TokenRun& theirs = other.prompt_.runs[other.run_];
    return mine.kind == theirs.kind && mine.kind != TokenRun::Kind::literal &&
           mine.seed == theirs.seed && mine.first + i_ == theirs.first + other.i_;
  }
  // REQUIRES: tokens is at most left().
  void forward(std::uint32_t tokens) {
    i_ += tokens;
    if (i_ < prompt_.runs[run_].count) return;
    i_ = 0;
    ++run_;
  }

 private:
  const Prompt& prompt_;
  std::size_t run_ = 0;
  std::uint32_t i_ = 0;
};

// What an image's tokens have in common in addition to their ids.
auto identity_of(const PromptItem& item) { return std::tie(item.identifier, item.count); }

// Returns the number of leading tokens that two prompts share, and their order at the first
// difference; a prefix sorts first, equal prompts compare equal. Runs of equal sources are skipped
// whole, so long synthetic prompts cost one comparison per run.
std::pair<std::int64_t, std::strong_ordering> parting_of_tokens(const Prompt& a, const Prompt& b) {
  std::int64_t shared = 0;
  Walk mine(a), theirs(b);
  while (!mine.at_end() && !theirs.at_end()) {
    std::uint32_t tokens = 1;
    if (mine.runs_like(theirs))
      tokens = std::min(mine.left(), theirs.left());
    else if (const auto order = mine.token() <=> theirs.token(); order != 0)
      return {shared, order};
    shared += tokens;
    mine.forward(tokens);
    theirs.forward(tokens);
  }
  return {shared, theirs.at_end() <=> mine.at_end()};
}

// The same with images: prompts part where an image starts in one of them only. There the prompt
// without it sorts first.
std::pair<std::int64_t, std::strong_ordering> parting(const RequestSpec& a, const RequestSpec& b) {
  const auto [shared, order] = parting_of_tokens(a.prompt, b.prompt);
  const auto [mine, theirs] = std::ranges::mismatch(
      a.keys.mm, b.keys.mm, [](const PromptItem& one, const PromptItem& other) {
        return one.first == other.first && identity_of(one) == identity_of(other);
      });
  const std::int64_t my_start = mine == a.keys.mm.end() ? INT64_MAX : mine->first;
  const std::int64_t their_start = theirs == b.keys.mm.end() ? INT64_MAX : theirs->first;
  if (std::min(my_start, their_start) >= shared) return {shared, order};
  if (my_start != their_start) return {std::min(my_start, their_start), their_start <=> my_start};
  return {my_start, identity_of(*mine) <=> identity_of(*theirs)};
}

// Returns the key of a block: `head`, and its content; moves `walk` past it. A symbolic run enters
// the key with its seed and first position only, so a block of 512 symbolic tokens adds three
// numbers. ~seed keeps it apart from token ids.
std::vector<std::uint64_t> content_of(Walk& walk, std::vector<std::uint64_t> head,
                                      std::int64_t tokens) {
  std::vector<std::uint64_t> content = std::move(head);
  TokenIdentity next{};
  bool has_next = false;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const TokenIdentity token = walk.token();
    walk.forward(1);
    // Symbolic tokens that continue the run add nothing.
    if (!has_next || token != next) {
      content.push_back(token.is_symbolic ? ~token.seed : static_cast<std::uint64_t>(token.token));
      if (token.is_symbolic) {
        content.push_back(static_cast<std::uint64_t>(token.token));
        content.push_back(static_cast<std::uint64_t>(i));
      }
    }
    has_next = token.is_symbolic;
    next = {true, token.seed, token.token + 1};
  }
  return content;
}

// Everything besides tokens and images that two requests must have in common to share blocks: salt,
// adapter, embeddings. Rows and digests exclude each other, so different keys never give equal
// lists.
std::vector<std::string> keys_of(const RequestSpec& spec) {
  std::vector<std::string> keys = {spec.cache_salt, spec.keys.lora.name, spec.keys.lora.path};
  const auto add_number = [&](std::int64_t number) { keys.push_back(std::to_string(number)); };
  const PromptEmbeds& embeds = spec.keys.embeds;
  add_number(embeds.width);
  for (const TokenRun& run : embeds.rows)
    for (const std::uint64_t number :
         {run.seed, std::uint64_t{run.first}, std::uint64_t{run.count}})
      add_number(static_cast<std::int64_t>(number));
  keys.insert(keys.end(), embeds.digests.begin(), embeds.digests.end());
  return keys;
}

}  // namespace

// Sorts the prompts by content: then any two prompts share the minimum of what the neighbours
// between them share, and n - 1 comparisons suffice.
SharedPrefixes shared_prefixes(const std::vector<const TraceRequest*>& requests) {
  std::vector<const TraceRequest*> sorted = requests;
  std::ranges::stable_sort(sorted, [](const TraceRequest* a, const TraceRequest* b) {
    const auto a_keys = keys_of(a->spec);
    const auto b_keys = keys_of(b->spec);
    if (a_keys != b_keys) return a_keys < b_keys;
    return parting(a->spec, b->spec).second < 0;
  });
  SharedPrefixes shared;
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (keys_of(sorted[i - 1]->spec) != keys_of(sorted[i]->spec)) continue;
    const auto [tokens, order] = parting(sorted[i - 1]->spec, sorted[i]->spec);
    // Equal prompts share a partial last block too, so they do not restrict the unit.
    if (order == 0 || tokens == 0) continue;
    shared.unit = std::gcd(shared.unit, tokens);
    shared.pairs.push_back({sorted[i - 1]->spec.name, sorted[i]->spec.name, tokens});
  }
  return shared;
}

// A unit of 0 is divisible by everything: without shared prefixes the block is `block_max`.
std::int32_t block_that_tells_all(const SharedPrefixes& shared, std::int32_t block_max) {
  std::int32_t block = 1;
  while (block * 2 <= block_max && shared.unit % (block * 2) == 0) block *= 2;
  return block;
}

// A chain, as block hashes are: the key of a block contains the id of the previous block, so that
// equal ids mean equal prefixes. ~salt starts the chain and is never a block's id. The images that
// start in a block are part of its key: their number, then each with its offset.
std::vector<std::vector<std::uint64_t>> prefix_ids(const std::vector<const TraceRequest*>& requests,
                                                   std::int32_t block_tokens) {
  LS_CHECK(block_tokens > 0, "blocks of {} tokens", block_tokens);
  std::map<std::vector<std::string>, std::uint64_t> salts;
  std::map<std::tuple<std::string_view, std::int32_t>, std::uint64_t> images;
  std::map<std::vector<std::uint64_t>, std::uint64_t> id_of;
  std::vector<std::vector<std::uint64_t>> ids;
  for (const TraceRequest* request : requests) {
    std::vector<std::uint64_t>& mine = ids.emplace_back();
    Walk walk(request->spec.prompt);
    const std::uint64_t salt =
        salts.try_emplace(keys_of(request->spec), salts.size()).first->second;
    std::uint64_t parent = ~salt;  // never a block's id
    auto item = request->spec.keys.mm.begin();
    const std::int64_t size = request->spec.prompt.size();
    for (std::int64_t at = 0; at < size; at += block_tokens) {
      const std::int64_t tokens = std::min<std::int64_t>(size - at, block_tokens);
      std::vector<std::uint64_t> head = {parent, static_cast<std::uint64_t>(tokens), 0};
      for (; item != request->spec.keys.mm.end() && item->first < at + tokens; ++item, ++head[2]) {
        head.push_back(images.try_emplace(identity_of(*item), images.size()).first->second);
        head.push_back(static_cast<std::uint64_t>(item->first - at));
      }
      parent =
          id_of.try_emplace(content_of(walk, std::move(head), tokens), id_of.size()).first->second;
      mine.push_back(parent);
    }
  }
  return ids;
}

namespace {

constexpr std::array kExportFormats = std::to_array<ExportFormat>({
    {ExportAs::mooncake, "mooncake", 512},
    {ExportAs::aiperf, "aiperf", 512},
    {ExportAs::timed_trace, "timed_trace", 16},
});

const ExportFormat& format_of(ExportAs as) {
  return *std::ranges::find(kExportFormats, as, &ExportFormat::as);
}

// An optional property of a request that most formats cannot express.
struct RarePart {
  std::string_view what;
  bool (*is_there)(const TraceRequest& request);
  bool is_in_aiperf = false;
};

constexpr RarePart kRareParts[] = {
    {"an arrival after another request ends",
     [](const TraceRequest& request) { return !request.after.empty(); }},
    {"an abort", [](const TraceRequest& request) { return request.abort.has_value(); }},
    {"an end by a token (eos, stop_token_ids)",
     [](const TraceRequest& request) {
       return request.spec.eos_token || !request.spec.stop_token_ids.empty();
     }},
    {"a priority", [](const TraceRequest& request) { return request.spec.priority != 0; }, true},
    {"min_tokens", [](const TraceRequest& request) { return request.spec.min_tokens != 0; }, true},
    {"repetition_detection",
     [](const TraceRequest& request) {
       return request.spec.repetition_detection != RepetitionDetection{};
     }},
    {"skip_reading_prefix_cache",
     [](const TraceRequest& request) { return request.spec.skip_reading_prefix_cache; }},
};

// One export. Obstacles are collected over the whole trace first, so that one error message names
// all of them.
//
// Invariants
// (1) Rows are written only when no obstacle exists or the export is lossy.
// (2) An obstacle has one entry per kind, with the first request that has it and a count.
class Exporter {
 public:
  Exporter(const std::string& file, const ExportOptions& options)
      : file_(file), options_(options), format_(format_of(options.as)) {}

  Result<ExportedTrace> run(const Trace& trace) {
    take_requests(trace);
    if (arrivals_.empty()) return fail("{}: no requests to export", file_);
    std::vector<const TraceRequest*> requests;
    for (const Arrival& arrival : arrivals_) requests.push_back(arrival.request);
    choose_block(shared_prefixes(requests));
    if (!options_.is_lossy && !obstacles_.empty()) return fail(obstacles_text());
    for (Obstacle& obstacle : obstacles_)
      exported_.left_out.push_back({.what = std::move(obstacle.what), .count = obstacle.count});
    const auto ids = prefix_ids(requests, exported_.block_tokens);
    for (std::size_t i = 0; i < arrivals_.size(); ++i)
      exported_.text += row_of(arrivals_[i], ids[i]);
    exported_.num_requests = std::ssize(arrivals_);
    return std::move(exported_);
  }

 private:
  // A request and the time at which a client sends it.
  struct Arrival {
    const TraceRequest* request;
    std::int64_t t_ns;
  };
  struct Obstacle {
    std::string first;  // where it occurs first
    std::string what;
    std::int64_t count = 1;
  };

  // Counts an obstacle; `first` names where it occurs.
  void note(std::string first, std::string_view what) {
    const auto found = std::ranges::find(obstacles_, what, &Obstacle::what);
    if (found != obstacles_.end())
      ++found->count;
    else
      obstacles_.push_back({.first = std::move(first), .what = std::string(what)});
  }

  // "an abort (request r1 and 4 more), a priority (request r2)"
  std::string obstacles_text() const {
    std::string list;
    for (const Obstacle& obstacle : obstacles_)
      list += fmt::format(
          "{}{} ({}{})", list.empty() ? "" : ", ", obstacle.what, obstacle.first,
          obstacle.count > 1 ? fmt::format(" and {} more", with_commas(obstacle.count - 1)) : "");
    const bool is_one = obstacles_.size() == 1;
    return fmt::format("{}: {} cannot hold {}{}; --lossy leaves {} out", file_, format_.name,
                       is_one ? "" : fmt::format("{} things: ", obstacles_.size()), list,
                       is_one ? "it" : "them");
  }

  // Collects requests in order of arrival, and the obstacles. An arrival after other requests
  // becomes a time: their latest arrival plus the delay, since the export cannot state when they
  // end. Resets and pauses are obstacles of the trace, not of a request.
  void take_requests(const Trace& trace) {
    std::map<std::string_view, std::int64_t> arrived;
    for (const TraceRecord& record : trace.records) {
      const auto* const request = std::get_if<TraceRequest>(&record);
      if (request == nullptr) {
        note("the trace", std::get<TraceControl>(record).kind == TraceControl::Kind::pause_state
                              ? "a pause"
                              : "a reset of the prefix cache");
        continue;
      }
      for (const RarePart& part : kRareParts)
        if (part.is_there(*request) && !(part.is_in_aiperf && options_.as == ExportAs::aiperf))
          note(fmt::format("request {}", request->spec.name), part.what);
      std::int64_t t_ns = request->after.empty() ? request->spec.arrival_ns : 0;
      for (const std::string& name : request->after)
        t_ns = std::max(t_ns, arrived[name] + request->delay_ns);
      arrived[request->spec.name] = t_ns;
      arrivals_.push_back({request, t_ns});
    }
    std::ranges::stable_sort(arrivals_, {}, &Arrival::t_ns);
  }

  // Determines the tokens per id. A requested block that splits a shared prefix is an obstacle:
  // sharing would be lost. The first such pair is named, the others are counted.
  void choose_block(const SharedPrefixes& shared) {
    const std::int32_t tells_all = block_that_tells_all(shared, format_.block_tokens_max);
    exported_.block_tokens = options_.block_tokens.value_or(tells_all);
    if (options_.is_lossy) return;
    std::int64_t count = 0;
    for (const SharedPrefixes::Between& pair : shared.pairs)
      if (pair.tokens % exported_.block_tokens != 0 && count++ == 0)
        obstacles_.push_back(
            {.first = fmt::format("requests {} and {}", pair.first, pair.second),
             .what =
                 fmt::format("{} of a shared prefix in ids of {}, as --block {} does",
                             counted(pair.tokens, "token"), exported_.block_tokens, tells_all)});
    if (count > 1) obstacles_.back().count = count;
  }

  // One line. A time is a decimal number in the format's unit; a whole number has no ".0".
  std::string row_of(const Arrival& arrival, const std::vector<std::uint64_t>& ids) const {
    const TraceRequest& request = *arrival.request;
    JsonWriter out;
    out.begin_object();
    if (options_.as == ExportAs::aiperf) out.string("session_id", request.spec.name);
    const int digits = options_.as == ExportAs::timed_trace ? 9 : 6;
    std::string time = decimal_text_of(arrival.t_ns, digits);
    if (time.ends_with(".0")) time.resize(time.size() - 2);
    out.key("timestamp").raw(time);
    out.integer("input_length", request.spec.prompt.size());
    out.integer("output_length", request.output.length);
    out.key("hash_ids").integers(ids);
    if (options_.as == ExportAs::aiperf) write_extra(out, request.spec);
    out.end_object();
    return out.take_line();
  }

  // AIPerf passes these to the server; ignore_eos makes the output as long as the trace states.
  static void write_extra(JsonWriter& out, const RequestSpec& spec) {
    out.key("extra").begin_object().boolean("ignore_eos", true);
    if (spec.min_tokens != 0) out.integer("min_tokens", spec.min_tokens);
    if (spec.priority != 0) out.integer("priority", spec.priority);
    out.end_object();
  }

  const std::string& file_;
  const ExportOptions& options_;
  const ExportFormat& format_;
  std::vector<Arrival> arrivals_;  // ascending
  std::vector<Obstacle> obstacles_;
  ExportedTrace exported_;
};

}  // namespace

std::span<const ExportFormat> export_formats() { return kExportFormats; }

Result<ExportedTrace> export_trace(const std::string& file, const Trace& trace,
                                   const ExportOptions& options) {
  return Exporter(file, options).run(trace);
}

}  // namespace lockstep
